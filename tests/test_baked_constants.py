"""Tests of Python values that a capture would freeze: they differ between warm-up and capture."""

import itertools
import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import CaptureError, Phase
from graphfsdp.hazards import HazardKind
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, quick_garbage_collection, snapshot

Number = Callable[[], float]


class Scaled(nn.Module):
    """Multiplies by what Python says, in one of several ways."""

    def __init__(self, number: Number, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number = number
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        number = self.number()
        h = self.linear(x)
        if self.way == "argument":
            h = h * number
        elif self.way == "literal":
            h = h * torch.tensor(number)
        elif self.way == "path":
            h = h.relu() if number % 2 else h.tanh()
        elif self.way == "no_grad":
            with torch.no_grad():
                x = x + number
            h = self.linear(x)
        elif self.way == "backward":
            h.register_hook(lambda grad: grad * number)
        loss: Tensor = h.square().mean()
        return loss


def make_step(
    model: nn.Module, device: torch.device, warmup_steps: int = 3
) -> graphfsdp.CapturedStep:
    quick_garbage_collection()
    optimizer = FusedAdam(model.to(device).parameters(), lr=0.01)
    return graphfsdp.capture(model, optimizer, warmup_steps=warmup_steps)


KINDS = {
    "argument": HazardKind.BAKED_NUMBER,
    "literal": HazardKind.BAKED_NUMBER,
    "no_grad": HazardKind.BAKED_NUMBER,
    "backward": HazardKind.BAKED_NUMBER,
    "path": HazardKind.CONTROL_FLOW,
}


@pytest.mark.parametrize("way", KINDS)
def test_a_counter_is_refused_with_its_line_and_undone(way: str, device: torch.device) -> None:
    counter = itertools.count(1)
    model = Scaled(lambda: float(next(counter)), way)
    step = make_step(model, device)
    x = torch.randn(8, 4, device=device)
    for _ in range(3):
        step(x)
    before = snapshot(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CaptureError, match="Remedy") as caught:
        step(x)
    assert_same_state(before, snapshot(model, torch.optim.SGD(model.parameters())), "undone")
    assert caught.value.kind is KINDS[way]
    assert caught.value.source is not None
    assert caught.value.source.file == __file__
    assert step.phase is Phase.WARMUP


@pytest.mark.parametrize("number", [time.perf_counter, lambda: random.Random().random()])
def test_clocks_and_generators_of_ones_own_are_refused(number: Number) -> None:
    step = make_step(Scaled(number, "argument"), torch.device("cpu"))
    x = torch.randn(8, 4)
    for _ in range(3):
        step(x)
    with pytest.raises(CaptureError):
        step(x)


def test_what_was_mended_is_captured_after_one_more_warm_up(device: torch.device) -> None:
    numbers = itertools.chain([1.0, 2.0, 3.0, 4.0], itertools.repeat(5.0))
    model = Scaled(lambda: next(numbers), "argument")
    step = make_step(model, device)
    x = torch.randn(8, 4, device=device)
    for _ in range(3):
        step(x)
    with pytest.raises(CaptureError, match=r"was given 3\.0 .* and 4\.0"):
        step(x)
    phases = []
    for _ in range(3):
        step(x)
        phases.append(step.phase)
    assert phases == [Phase.WARMUP, Phase.REPLAY, Phase.REPLAY]


def test_a_counter_that_goes_on_is_refused_again(device: torch.device) -> None:
    counter = itertools.count(1)
    step = make_step(Scaled(lambda: float(next(counter)), "argument"), device)
    x = torch.randn(8, 4, device=device)
    refused = []
    for _ in range(9):
        try:
            step(x)
            refused.append(False)
        except CaptureError:
            refused.append(True)
    assert refused == [False] * 3 + [True, False] * 3


class Lazy(nn.Module):
    """Makes a cache in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(4.0, device=x.device).sin()
        loss: Tensor = (self.linear(x) * self.cache).square().mean()
        return loss


def test_what_only_the_first_call_does_is_no_reason_to_refuse(device: torch.device) -> None:
    step = make_step(Lazy(), device, warmup_steps=1)
    x = torch.randn(8, 4, device=device)
    for _ in range(3):
        step(x)
    assert step.phase is Phase.REPLAY


def test_a_schedule_of_a_torch_optimizer_is_the_guards_business() -> None:
    quick_garbage_collection()
    model = Scaled(lambda: 2.0, "argument")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphfsdp.capture(model, optimizer)
    x = torch.randn(8, 4)
    for rate in (0.1, 0.2, 0.3, 0.4, 0.4, 0.4):
        optimizer.param_groups[0]["lr"] = rate
        step(x)
    assert step.phase is Phase.REPLAY


def test_numbers_of_optimizers_inside_a_users_iteration_may_change() -> None:
    quick_garbage_collection()
    model = Scaled(lambda: 2.0, "argument")
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    decay = iter([0.5, 0.6, 0.7, 0.8, 0.9])

    def iteration(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        return loss

    step = graphfsdp.capture(model, optimizer, iteration=iteration)
    for _ in range(5):
        optimizer.param_groups[0]["lr"] = next(decay)
        step(torch.randn(8, 4))
    assert step.phase is Phase.REPLAY
