"""A number outside of modules that the loss function counts and decides by."""

import sys
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from faults import World
from graphfsdp import CaptureError
from graphfsdp.base.hazards import HazardKind
from graphfsdp.optim import FusedAdam
from helpers import line_of, snapshot

Loss = Callable[[nn.Module, Tensor], Tensor]
CALLS = 0
STATE = {"calls": 0}


def base(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def by_global(model: nn.Module, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    loss = base(model, x)
    return loss * 2 if CALLS > 1000 else loss  # late


def by_item(model: nn.Module, x: Tensor) -> Tensor:
    STATE["calls"] += 1
    loss = base(model, x)
    if STATE["calls"] % 1000 == 0:  # late
        return loss * 2
    return loss


def late_factor() -> float:
    return 1.0 if STATE["calls"] < 1000 else 2.0  # late


def by_helper(model: nn.Module, x: Tensor) -> Tensor:
    STATE["calls"] += 1
    return base(model, x) * late_factor()


def make_by_closure() -> Loss:
    calls = 0

    def by_closure(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        loss = base(model, x)
        while calls > 1000:  # late
            return loss * 2
        return loss

    return by_closure


def make_by_list() -> Loss:
    calls = [0]

    def by_list(model: nn.Module, x: Tensor) -> Tensor:
        calls[0] += 1
        loss = base(model, x)
        return loss * 2 if calls[0] > 1000 else loss  # late

    return by_list


def make_by_attribute() -> Loss:
    config = types.SimpleNamespace(calls=0)

    def by_attribute(model: nn.Module, x: Tensor) -> Tensor:
        config.calls += 1
        loss = base(model, x)
        return loss * 2 if config.calls == 1000 else loss  # late

    return by_attribute


class Criterion:
    def __init__(self) -> None:
        self.calls = 0
        self.warm_up = 500

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        loss = base(model, x)
        return loss if self.calls < self.warm_up else loss * 2  # late


def _of_nested(model: nn.Module, x: Tensor) -> Tensor:
    STATE["calls"] += 1

    def factor() -> float:
        return 2.0 if STATE["calls"] > 1000 else 1.0  # late

    return base(model, x) * factor()


REFUSED: dict[str, tuple[Callable[[], Loss], Callable[..., Any] | None]] = {
    "global": (lambda: by_global, by_global),
    "item": (lambda: by_item, by_item),
    "helper": (lambda: by_helper, late_factor),
    "closure": (make_by_closure, None),
    "list": (make_by_list, None),
    "attribute": (make_by_attribute, None),
    "object": (Criterion, Criterion.__call__),
    "nested": (lambda: _of_nested, _of_nested),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_count_around_the_loss_function_that_decides_is_refused_with_its_line(
    name: str,
) -> None:
    make, place = REFUSED[name]
    loss_fn = make()
    model = nn.Linear(4, 4)
    optim = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optim, loss_fn=loss_fn) as step:
        for _ in range(3):
            step(torch.ones(3, 4))
        world = World(model, optim)
        with pytest.raises(CaptureError, match=r"in Python .* decides by it") as caught:
            step(torch.ones(3, 4))
        world.assert_unchanged("refused")
    assert caught.value.kind is HazardKind.CONTROL_FLOW
    assert caught.value.source is not None
    assert caught.value.source.line == line_of(place or loss_fn, "late")


@pytest.mark.parametrize("name", ["global", "item", "closure", "object"])
def test_the_check_finds_it(name: str) -> None:
    model = nn.Linear(4, 4)
    loss_fn = REFUSED[name][0]()
    report = graphfsdp.check(
        model, FusedAdam(model.parameters()), torch.ones(3, 4), loss_fn=loss_fn
    )
    assert HazardKind.CONTROL_FLOW in {hazard.kind for hazard in report.hazards}


def make_counting() -> Loss:
    """Count in every way, and decide nothing that is not decided for ever."""
    calls, seen = 0, []
    state = {"calls": 0, "best": 0}

    def counting(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        state["calls"] += 1
        seen.append(calls)
        if calls == 1 or not state["calls"] or state["calls"] == 3:  # passed when it is tested
            state["best"] = 7
        return base(model, x) * (2 if state["best"] == 7 else 1)

    return counting


def test_what_is_only_counted_is_captured_and_trains_as_eagerly() -> None:
    found = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optim = FusedAdam(model.parameters(), lr=0.01)
        with graphfsdp.capture(model, optim, scope=scope, loss_fn=make_counting()) as step:
            losses = [step(torch.randn(3, 4)) for _ in range(14)]
        found.append([*losses, *snapshot(model, optim).values()])
    assert all(map(torch.equal, *found))


def test_a_count_that_the_loop_keeps_is_guarded_and_not_refused() -> None:
    state = {"calls": 0}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return base(model, x) * (2 if state["calls"] > 8 else 1)

    found = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optim = FusedAdam(model.parameters(), lr=0.01)
        options: dict[str, Any] = {"scope": scope, "loss_fn": loss_fn, "on_change": "recapture"}
        with graphfsdp.capture(model, optim, **options) as step:
            for index in range(16):
                state["calls"] = 9 if index > 8 else 0
                step(torch.randn(3, 4))
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


def by_built_in_modules(model: nn.Module, x: Tensor) -> Tensor:
    """Names modules that have no file."""
    sys.getrefcount(x)
    time.perf_counter()
    return base(model, x)


def test_modules_that_are_built_into_python_have_no_counters() -> None:
    assert not hasattr(sys, "__file__")
    model = nn.Linear(4, 4)
    optim = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optim, loss_fn=by_built_in_modules) as step:
        for _ in range(6):
            step(torch.randn(3, 4))
        assert step.phase is graphfsdp.Phase.REPLAY


class Schedule(nn.Module):
    """A criterion that is a module, and none of the model's."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.step = 0
        self.limit = limit

    def forward(self, loss: Tensor) -> Tensor:
        self.step += 1
        return loss * 2 if self.step > self.limit else loss


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.layer(x)
        return result


def by_attribute_of_the_model(model: nn.Module, x: Tensor) -> Tensor:
    loss = base(model, x)
    return loss * 2 if model.calls > 1000 else loss  # type: ignore[operator]


@pytest.mark.parametrize("limit", [1000, 1])
def test_a_criterion_that_is_a_module_is_searched_as_the_model_is(limit: int) -> None:
    criterion = Schedule(limit)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = criterion(base(model, x))
        return loss

    model = nn.Linear(4, 4)
    with graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn) as step:
        for _ in range(3):
            step(torch.ones(3, 4))
        if limit == 1000:
            with pytest.raises(CaptureError, match=r"'Schedule\.step' .* decides by it"):
                step(torch.ones(3, 4))
        else:  # decided for ever
            step(torch.ones(3, 4))
            assert step.phase is graphfsdp.Phase.REPLAY


def test_the_loss_function_may_decide_by_what_the_model_counts() -> None:
    model = Counting()
    optim = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optim, loss_fn=by_attribute_of_the_model) as step:
        for _ in range(3):
            step(torch.ones(3, 4))
        with pytest.raises(CaptureError, match=r"'calls' .* decides by it"):
            step(torch.ones(3, 4))
