"""Gradients that the user's iteration assigns by hand: replays leave them where eager runs do."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, set_lr, snapshot

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "fused_adam": lambda params: FusedAdam(params, lr=0.01, max_grad_norm=0.5),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), fused=True),
}


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


def train(
    make: Make, iteration: Callable[..., Tensor], scope: str | None
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Train with capture, or as None in a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    optim = make(model.parameters())
    found = []
    plain: Any = contextlib.nullcontext(functools.partial(iteration, model, optim))
    options: dict[str, Any] = {"iteration": iteration, "scope": scope}
    with graphfsdp.capture(model, optim, **options) if scope else plain as step:
        for index in range(14):
            set_lr(optim, 0.02 / (1 + index))
            if scope is None:
                optim.zero_grad()
            loss = step(torch.randn(3, 4))
            found.append((loss.detach(), snapshot(model, optim)))
    return found


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
    captured = train(OPTIMIZERS[optimizer], iteration, "full_iteration")
    for scope in ("none", None):
        expected = train(OPTIMIZERS[optimizer], iteration, scope)
        for index, ((loss, state), (got, now)) in enumerate(zip(expected, captured, strict=True)):
            assert torch.equal(loss, got), index
            assert_same_state(state, now, f"call {index}")
            num_grads = sum(name.startswith("grad of") for name in now)
            assert num_grads == (0 if iteration is taken_off else 4)
