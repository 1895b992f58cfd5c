"""Numbers that an iteration counts in Python, and by which it decides nothing that can turn.

Those that decide what runs are in test_moves.py.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import CountingNet, Loss, mean_square
from graphfsdp.optim import FusedAdam
from helpers import assert_same_states, snapshot


class Reads(CountingNet):
    """Looks at what it counts, and decides nothing by it."""

    def decide(self, y: Tensor) -> Tensor:
        self.shown = f"{self.calls}"
        return y * 2 if self.late == 50 else y


class Counts(CountingNet):
    """Counts in a buffer, as the message about counters advises."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def decide(self, y: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.where(self.count > 8, y * 2, y)


class SameName(nn.Module):
    """Decides by a number of its own, which is called like another module's count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CountingNet()
        self.calls = 5

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(x)
        return loss * 2 if self.calls > 3 else loss


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
        return mean_square(model, x) * (2 if state["best"] == 7 else 1)

    return counting


def by_built_in_modules(model: nn.Module, x: Tensor) -> Tensor:
    """Names modules that have no file."""
    sys.getrefcount(x)
    time.perf_counter()
    return mean_square(model, x)


def assert_trains_as_eagerly(
    make_model: Callable[[], nn.Module],
    make_loss: Callable[[], Loss | None] = lambda: None,
    before_call: Callable[[Any, int], Any] = lambda model, index: None,
    **options: Any,
) -> None:
    def train(scope: str) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        model = make_model()
        optim = FusedAdam(model.parameters(), lr=0.01)
        states = []
        with graphfsdp.capture(model, optim, loss_fn=make_loss(), scope=scope, **options) as step:
            for index in range(16):
                before_call(model, index)
                states.append({"loss": step(torch.randn(3, 4)), **snapshot(model, optim)})
            phase = graphfsdp.Phase.EAGER if scope == "none" else graphfsdp.Phase.REPLAY
            assert step.phase is phase
        return states

    assert_same_states(train("none"), train("full_iteration"))


def linear() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.mark.parametrize("make_model", [CountingNet, Reads, Counts, SameName])
def test_a_model_that_only_counts_or_decides_for_ever_is_captured(
    make_model: Callable[[], nn.Module],
) -> None:
    assert_trains_as_eagerly(make_model)


@pytest.mark.parametrize(
    "make_loss",
    [make_counting, lambda: by_built_in_modules],
    ids=["counting", "built-in modules"],
)
def test_a_loss_that_only_counts_or_decides_for_ever_is_captured(
    make_loss: Callable[[], Loss],
) -> None:
    assert not hasattr(sys, "__file__")  # so that there is a module without a file
    assert_trains_as_eagerly(linear, make_loss)


def test_what_the_loop_sets_is_guarded_and_not_refused() -> None:
    class Told(CountingNet):
        def decide(self, y: Tensor) -> Tensor:
            return y * 2 if self.turn else y

    assert_trains_as_eagerly(
        Told,
        before_call=lambda model, index: setattr(model, "turn", index > 8),
        on_change="recapture",
    )
    state = {"calls": 0}
    loss_fn: Loss = lambda model, x: mean_square(model, x) * (2 if state["calls"] > 8 else 1)  # noqa: E731
    assert_trains_as_eagerly(
        linear,
        lambda: loss_fn,
        lambda model, index: state.update(calls=9 if index > 8 else 0),
        on_change="recapture",
    )
