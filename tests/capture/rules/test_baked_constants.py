"""Tests of Python values that a capture would freeze: they differ between warm-up and capture."""

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import CaptureError, HazardKind, Phase
from graphfsdp.optim import FusedAdam
from helpers import Case, assert_same_state, run_as_eager, snapshot
from zoo import features

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
    """Each time anew, behind one more warm-up."""
    counter = itertools.count(1)
    model = Scaled(lambda: float(next(counter)), way)
    step = make_step(model, device)
    x = torch.randn(8, 4, device=device)
    for index in range(5 if way == "path" else 9):  # two paths come back
        is_refused = index in (4, 7)  # the fourth is done again, in case it was only this once
        before = snapshot(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(CaptureError, match="Remedy") if is_refused else nullcontext() as caught:
            step(x)
        assert (step.phase, caught is not None) == (Phase.WARMUP, is_refused)
        if caught is not None:
            assert_same_state(before, snapshot(model, torch.optim.SGD(model.parameters())))
            assert caught.value.kind is KINDS[way]
            assert caught.value.source is not None
            assert caught.value.source.file == __file__


def test_what_changes_once_costs_one_more_warm_up(device: torch.device) -> None:
    held = {"number": 1.0}

    def setup(model: nn.Module, optimizer: object) -> Callable[[], object]:
        held["number"] = 1.0
        later = iter([1.0] * 2 + [5.0] * 20)
        return lambda: held.update(number=next(later))

    number = functools.partial(held.__getitem__, "number")
    case = Case(lambda: Scaled(number, "argument"), features(4), setup=setup)
    report = run_as_eager(case, device).report
    assert report.num_calls == {"warmup": 4, "capture": 1, "replay": 9}


class Positions(nn.Module):
    """Makes a cache for each length, with operators that the model calls as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.caches: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        length = len(x)
        if length not in self.caches:
            self.caches[length] = torch.arange(length, device=x.device).unsqueeze(1)
        places = torch.arange(4 * length, device=x.device).view(length, 4)
        loss: Tensor = (self.linear(x + places) * self.caches[length]).square().mean()
        return loss


def test_operators_that_only_the_first_run_calls_shift_nothing(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    step = make_step(Positions(), device, warmup_steps=1)
    phases = [(step(x), step.phase)[1] for _ in range(2)]
    assert phases == [Phase.WARMUP, Phase.REPLAY]
    optimizer = FusedAdam((model := Positions().to(device)).parameters())
    with graphfsdp.capture(
        model, optimizer, example_batch=x, warmup_steps=1, on_change="recapture"
    ) as step:
        for length in (8, 6, 6, 6, 8):
            step(x[:length])
        assert step.report().num_captures == 2


@pytest.mark.parametrize("moves", [True, False])
def test_a_retry_after_another_failure_is_compared_as_well(
    moves: bool, device: torch.device
) -> None:
    """Without what was refused, and where that ran in warm-ups with fewer operators than they."""
    counter = itertools.count(1)
    model = Scaled((lambda: float(next(counter))) if moves else (lambda: 2.0), "argument")
    step = make_step(model, device)
    x = torch.randn(8, 4, device=device)
    for index in range(4):
        if index == (3 if moves else 0):
            hook = model.linear.register_forward_hook(
                lambda module, args, out: float(out.detach().sum()) and out
            )
        with pytest.raises(CaptureError, match="on the host") if index == 3 else nullcontext():
            step(x)
    hook.remove()
    step(x)  # captured; or refused, undone and warmed up once more
    assert step.phase is (Phase.WARMUP if moves else Phase.REPLAY)
    if moves:
        with pytest.raises(CaptureError, match=r"was given 6\.0 .* and 7\.0"):
            step(x)
