"""Batches whose keys come in any order, and of any device; parameters of an optimizer alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import make_optimizer, run, set_lr
from zoo import ZOO
from zoo_models import WIDTH, Squared


@pytest.mark.parametrize("in_a_dictionary", [False, True])
def test_keys_of_a_batch_may_come_in_any_order(in_a_dictionary: bool, device: torch.device) -> None:
    model = Squared(nn.Linear(WIDTH, 3)).to(device)

    def loss_fn(model: nn.Module, batch: Any = None, **kwargs: Tensor) -> Tensor:
        given = batch if in_a_dictionary else kwargs
        loss: Tensor = model(given["x"]) * given["weight"]
        return loss

    def call(**given: Tensor) -> Any:
        return step(given) if in_a_dictionary else step(**given)

    step = graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn)
    x, weight = torch.randn(4, WIDTH, device=device), torch.tensor(2.0, device=device)
    for _ in range(5):
        call(x=x, weight=weight)
    expected = 3.0 * model(x).detach()
    assert torch.equal(call(weight=torch.tensor(3.0, device=device), x=x), expected)


def test_the_batch_is_moved_to_the_models_device(device: torch.device) -> None:
    case = ZOO["mlp"]
    moved = run(case, "full_iteration", device)
    torch.manual_seed(0)
    model = case.make().to(device)
    optim = make_optimizer("fused_adam", model.parameters(), device)
    generator = torch.Generator().manual_seed(1)
    step = graphfsdp.capture(model, optim)
    for index, outputs in enumerate(moved.outputs):
        set_lr(optim, 0.02 / (1 + index))
        torch.rand((), device=device)
        (x,) = case.batch(generator).args
        loss = step(x)
        x.fill_(float("nan"))  # the caller's memory is free as soon as the call returns
        assert torch.equal(loss, outputs[0])


def test_parameters_that_only_the_optimizer_knows_are_trained(device: torch.device) -> None:
    def train(scope: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = Squared(nn.Linear(WIDTH, 3)).to(device)
        outside = nn.Parameter(torch.ones(3, device=device))
        groups = [{"params": list(model.parameters())}, {"params": [outside]}]
        optim = FusedAdam(groups, lr=0.01)

        def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x) + (outside * x[:, :3]).square().mean()
            return loss

        step = graphfsdp.capture(model, optim, loss_fn=loss_fn, scope=scope)
        for index in range(8):
            step(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device))
        assert outside.grad is not None
        return outside.detach(), outside.grad

    expected, got = train("none"), train("full_iteration")
    assert torch.equal(expected[0], got[0])
    assert torch.equal(expected[1], got[1])
    assert not torch.equal(got[0], torch.ones(3, device=device))
