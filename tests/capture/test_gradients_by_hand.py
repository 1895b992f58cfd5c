"""Gradients that the user's iteration assigns by hand: replays leave them where eager runs do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import OPTIMIZERS, Batch, Case, assert_same_run, run

CPU = torch.device("cpu")


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    params = list(model.parameters())
    loss: Tensor = model(x).square().mean()
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad * 2
    optimizer.step()
    return loss


def one_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    bias = next(param for param in model.parameters() if param.ndim == 1)
    assert bias.grad is not None
    bias.grad = bias.grad.sign()
    optimizer.step()
    return loss


def taken_off(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(generator: torch.Generator) -> Batch:
    return Batch((torch.randn(3, 4, generator=generator),))


@pytest.mark.parametrize(
    ("optimizer", "iteration"),
    [
        *((name, by_hand) for name in OPTIMIZERS),
        *(("fused_adam", one_by_hand), ("adamw", one_by_hand)),
        *(("fused_adam", taken_off), ("sgd", taken_off)),
    ],
)
def test_replays_leave_them_where_eager_iterations_and_plain_loops_do(
    optimizer: str, iteration: Callable[..., Tensor]
) -> None:
    case = Case(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)), batch)
    options: dict[str, Any] = {"optimizer": optimizer, "iteration": iteration}
    captured = run(case, "full_iteration", CPU, **options)
    for scope in ("none", "plain"):
        assert_same_run(run(case, scope, CPU, **options), captured)
    assert captured.report.num_calls["replay"] == 10
    for state in captured.snapshots:
        num_grads = sum(name.startswith("grad of") for name in state)
        assert num_grads == (0 if iteration is taken_off else 4)
