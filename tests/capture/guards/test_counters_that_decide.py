"""Numbers that an iteration counts in Python: those that decide what runs, and those that do not.

No replay follows a number that decides. Nothing refuses the programs of the first table for now;
what will is expected to name the line that decides. Those of the second table must be captured.
"""

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
from guard_net import NOT_REFUSED_YET
from helpers import line_of, snapshot


class Net(nn.Module):
    """Counts its calls; what it decides is up to those that derive from it."""

    limit = 100  # of the class, not of the instance

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.left = 9
        self.late = 50
        self.early = 1
        self.turn = False
        self.word = "a"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.calls += 1
        self.left -= 1
        return self.decide(y).square().mean()

    def decide(self, y: Tensor) -> Tensor:
        return y


class Later(Net):
    def decide(self, y: Tensor) -> Tensor:
        if self.calls > 8:  # late
            return y * 2
        return y


class EveryNinth(Net):
    def decide(self, y: Tensor) -> Tensor:
        return y if self.calls % 9 else y * 2  # late


class Kept(Net):
    def decide(self, y: Tensor) -> Tensor:
        is_over = self.late <= self.calls
        return y * 2 if is_over else y  # late


class Assigned(Net):
    def decide(self, y: Tensor) -> Tensor:
        progress = self.calls / 1000
        if progress < 1:  # late
            return y
        return y * 2


class CountsTwice(Net):
    def decide(self, y: Tensor) -> Tensor:
        self.calls += 0
        if self.calls > 14:  # late
            y = y * 2
        self.calls += 3
        return y


class ClassLimit(Net):
    def decide(self, y: Tensor) -> Tensor:
        while self.calls > self.limit and y.ndim < 3:  # late
            y = y[None]
        return y


class RunsOut(Net):
    def decide(self, y: Tensor) -> Tensor:
        if not self.left:  # late
            y = y.relu()
        return y


class Chained(Net):
    def decide(self, y: Tensor) -> Tensor:
        if 0 < self.calls <= 1000:  # late
            y = y + 1
        return y


class Matched(Net):
    def decide(self, y: Tensor) -> Tensor:
        self.word = f"call {self.calls}"
        match self.word:  # late
            case "call 9":
                return y * 2
        return y


class Filtered(Net):
    def decide(self, y: Tensor) -> Tensor:
        parts = [part for part in (y, y * 2) if self.calls < 30]  # late
        return torch.stack([y, *parts]).sum(0)


def look(net: Net) -> bool:
    return net.calls > 30  # late


class InProperty(Net):
    is_late = property(look)

    def decide(self, y: Tensor) -> Tensor:
        return y * 2 if self.is_late else y


class Outer(nn.Module):
    """Decides by what a part of it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(x)
        return loss * 2 if self.inner.calls > 8 else loss  # late


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


class Schedule(nn.Module):
    """A criterion that is a module, and none of the model's."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.step = 0
        self.limit = limit

    def forward(self, loss: Tensor) -> Tensor:
        self.step += 1
        return loss * 2 if self.step > self.limit else loss  # late


def make_by_criterion(limit: int = 1000) -> Loss:
    criterion = Schedule(limit)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = criterion(base(model, x))
        return loss

    return loss_fn


def by_attribute_of_the_model(model: nn.Module, x: Tensor) -> Tensor:
    loss = base(model, x)
    return loss * 2 if model.calls > 1000 else loss  # type: ignore[operator]  # late


def linear() -> nn.Module:
    return nn.Linear(4, 4)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.layer(x)
        return result


# What makes the model and the loss function, and where it is decided; None: in the loss function.
Program = tuple[Callable[[], nn.Module], Callable[[], Loss | None], Callable[..., Any] | None]
OF_CLASSES = (
    *(Later, EveryNinth, Kept, Assigned, CountsTwice, ClassLimit, RunsOut),
    *(Chained, Matched, Filtered),
)
DECIDING: dict[str, Program] = {
    **{kind.__name__: (kind, lambda: None, kind.decide) for kind in OF_CLASSES},
    "InProperty": (InProperty, lambda: None, look),
    "Outer": (Outer, lambda: None, Outer.forward),
    "global": (linear, lambda: by_global, by_global),
    "item": (linear, lambda: by_item, by_item),
    "helper": (linear, lambda: by_helper, late_factor),
    "closure": (linear, make_by_closure, None),
    "list": (linear, make_by_list, None),
    "attribute": (linear, make_by_attribute, None),
    "object": (linear, Criterion, Criterion.__call__),
    "nested": (linear, lambda: _of_nested, _of_nested),
    "criterion": (linear, make_by_criterion, Schedule.forward),
    "model": (Counting, lambda: by_attribute_of_the_model, by_attribute_of_the_model),
}


@NOT_REFUSED_YET
@pytest.mark.parametrize("name", DECIDING)
def test_what_is_decided_by_a_counter_is_refused_with_its_line(name: str) -> None:
    make_model, make_loss, place = DECIDING[name]
    model, loss_fn = make_model(), make_loss()
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
    function = place or loss_fn
    assert function is not None
    assert caught.value.source.line == line_of(function, "late")


@NOT_REFUSED_YET
@pytest.mark.parametrize("name", ["Later", "global", "item", "closure", "object"])
def test_the_check_finds_it_in_one_iteration(name: str) -> None:
    model, loss_fn = DECIDING[name][0](), DECIDING[name][1]()
    x = torch.ones(3, 4)
    report = graphfsdp.check(model, FusedAdam(model.parameters()), x, loss_fn=loss_fn)
    assert HazardKind.CONTROL_FLOW in {hazard.kind for hazard in report.hazards}


class Initialises(Net):
    """As data-dependent initialisation does."""

    def decide(self, y: Tensor) -> Tensor:
        if self.calls == 1:
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
        return y


class Passed(Net):
    def decide(self, y: Tensor) -> Tensor:
        calls = self.calls
        assert self.calls < 10**9, "no decision, as long as it holds"
        if calls > 1 and self.calls > 1 and self.calls >= self.early and self.calls > -1:
            return y * 2
        return y


class InEveryPart(Net):
    """A count of parts of the batch, as many in each iteration."""

    def decide(self, y: Tensor) -> Tensor:
        self.calls += 2
        return y * 2 if self.calls % 3 == 0 else y


class Spent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.left = 1

    def decide(self, y: Tensor) -> Tensor:
        return y if self.left >= 0 else y * 2


class Reads(Net):
    """Looks at what it counts, and decides nothing by it."""

    def decide(self, y: Tensor) -> Tensor:
        self.shown = f"{self.calls}"
        return y * 2 if self.late == 50 else y


ALLOWED = (Net, Initialises, Passed, InEveryPart, Spent, Reads)


def train(kind: type[Net], scope: str = "full_iteration", num: int = 14) -> list[Tensor]:
    torch.manual_seed(0)
    model = kind()
    optim = FusedAdam(model.parameters(), lr=0.01)
    with graphfsdp.capture(model, optim, scope=scope) as step:
        losses = [step(torch.randn(3, 4)) for _ in range(num)]
        return [*losses, *snapshot(model, optim).values()]


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_is_only_counted_or_decided_for_ever_is_captured(kind: type[Net]) -> None:
    expected, got = train(kind, "none"), train(kind)
    assert all(map(torch.equal, expected, got))


def test_the_remedies_of_the_message_work() -> None:
    class Told(Net):
        def decide(self, y: Tensor) -> Tensor:
            return y * 2 if self.turn else y

    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.count: Tensor
            self.register_buffer("count", torch.zeros(()))

        def decide(self, y: Tensor) -> Tensor:
            self.count.add_(1)
            return torch.where(self.count > 8, y * 2, y)

    found = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(0)
        model = Told()
        optim = FusedAdam(model.parameters(), lr=0.01)
        with graphfsdp.capture(model, optim, scope=scope, on_change="recapture") as step:
            for index in range(14):
                model.turn = index > 8
                step(torch.randn(3, 4))
        found.append(model.layer.weight.detach().clone())
    assert torch.equal(*found)
    assert all(map(torch.equal, train(Counts, "none"), train(Counts)))


class Asks(Net):
    """Asks for the type of what it counts, and has code that no iteration runs."""

    def decide(self, y: Tensor) -> Tensor:
        if self.calls is None or not isinstance(self.calls, int):
            return y * 2
        return y

    def extra_repr(self) -> str:
        return "old" if self.calls > 1000 else "young"


class SameName(nn.Module):
    """Decides by a number of its own, which is called like another module's count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.calls = 5

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(x)
        return loss * 2 if self.calls > 3 else loss


@pytest.mark.parametrize("kind", [Asks, SameName])
def test_what_cannot_turn_with_the_count_is_captured(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    with graphfsdp.capture(model, FusedAdam(model.parameters())) as step:
        for _ in range(6):
            step(torch.randn(3, 4))
        assert step.phase is graphfsdp.Phase.REPLAY


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


def test_a_criterion_whose_count_has_decided_for_ever_is_captured() -> None:
    model = nn.Linear(4, 4)
    optim = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optim, loss_fn=make_by_criterion(1)) as step:
        for _ in range(4):
            step(torch.ones(3, 4))
        assert step.phase is graphfsdp.Phase.REPLAY
