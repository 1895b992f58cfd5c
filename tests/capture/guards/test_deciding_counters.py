"""A number that the iteration counts in Python and decides by: no replay would follow it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from faults import World
from graphfsdp import CaptureError
from graphfsdp.base.hazards import HazardKind
from graphfsdp.optim import FusedAdam
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


REFUSED = (
    *(
        Later,
        EveryNinth,
        Kept,
        Assigned,
        CountsTwice,
        ClassLimit,
        RunsOut,
        Chained,
        Matched,
        Filtered,
    ),
    InProperty,
)


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


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_decided_by_a_counter_is_refused_with_its_line(kind: type[Net]) -> None:
    model = kind()
    optim = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optim) as step:
        for _ in range(3):
            step(torch.randn(3, 4))
        batch = torch.randn(3, 4)
        world = World(model, optim)
        with pytest.raises(CaptureError, match=r"in Python .* decides by it") as caught:
            step(batch)
        world.assert_unchanged("refused")
    assert caught.value.kind is HazardKind.CONTROL_FLOW
    assert caught.value.source is not None
    function = look if kind is InProperty else kind.decide
    assert caught.value.source.line == line_of(function, "late")


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_is_only_counted_or_decided_for_ever_is_captured(kind: type[Net]) -> None:
    expected, got = train(kind, "none"), train(kind)
    assert all(map(torch.equal, expected, got))


def test_the_parts_of_a_model_are_told_by_their_path_and_may_decide_for_each_other() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.inner(x)
            return loss * 2 if self.inner.calls > 8 else loss

    model = Outer()
    with graphfsdp.capture(model, FusedAdam(model.parameters())) as step:
        for _ in range(3):
            step(torch.randn(3, 4))
        with pytest.raises(CaptureError, match=r"'inner\.calls' in Python \(from 3 to 4\)"):
            step(torch.randn(3, 4))


def test_the_check_finds_it_in_one_iteration() -> None:
    model = Later()
    report = graphfsdp.check(model, FusedAdam(model.parameters()), torch.randn(3, 4))
    (hazard,) = report.hazards
    assert hazard.kind is HazardKind.CONTROL_FLOW
    assert hazard.source is not None
    assert hazard.source.line == line_of(Later.decide, "late")


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
