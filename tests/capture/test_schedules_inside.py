"""Tests of schedules that are stepped inside the iteration, which a replay would not run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, snapshot

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "CosineAnnealingLR": lambda optim: lr_scheduler.CosineAnnealingLR(optim, 50),
    # Has not changed anything when the iteration is recorded.
    "StepLR": lambda optim: lr_scheduler.StepLR(optim, 6),
    "SequentialLR": lambda optim: lr_scheduler.SequentialLR(
        optim, [lr_scheduler.ConstantLR(optim), lr_scheduler.ExponentialLR(optim, 0.9)], [6]
    ),
    "SWALR": lambda optim: swa_utils.SWALR(optim, 1e-3),
    "ReduceLROnPlateau": lambda optim: lr_scheduler.ReduceLROnPlateau(optim, patience=0),
}


def start(
    after_step: Callable[[FusedAdam], object],
) -> tuple[graphfsdp.CapturedStep, nn.Module, FusedAdam]:
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    optim = FusedAdam(model.parameters(), lr=1e-2)

    def iteration(model: nn.Module, optim: FusedAdam, x: Tensor) -> Tensor:
        optim.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optim.step()
        after_step(optim)
        return loss

    return graphfsdp.capture(model, optim, iteration=iteration), model, optim


def refused(step: graphfsdp.CapturedStep, model: nn.Module, optim: FusedAdam, match: str) -> Any:
    for _ in range(3):
        step(torch.ones(2, 4))
    before, lr = snapshot(model, optim), optim.param_groups[0]["lr"]
    with pytest.raises(graphfsdp.CaptureError, match=match) as caught:
        step(torch.ones(2, 4))
    assert "outside the iteration" in str(caught.value)
    assert_same_state(before, snapshot(model, optim))
    assert optim.param_groups[0]["lr"] == lr
    return caught.value


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_inside_the_iteration_is_refused(name: str) -> None:
    schedulers: list[Any] = []

    def after_step(optim: FusedAdam) -> None:
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))

    step, model, optim = start(after_step)
    schedulers.append(SCHEDULERS[name](optim))
    error = refused(step, model, optim, f"{name}.step counts in Python")
    assert error.source is not None
    assert error.source.file == __file__


def test_a_learning_rate_that_the_iteration_sets_by_hand_is_refused() -> None:
    def after_step(optim: FusedAdam) -> None:
        for group in optim.param_groups:
            group["lr"] *= 0.5

    step, model, optim = start(after_step)
    refused(step, model, optim, "changed 'lr' of group 0 of FusedAdam from 0.00125 to 0.000625")
