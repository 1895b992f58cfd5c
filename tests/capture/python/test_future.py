"""Nothing silent: Python that an iteration moves is refused by name, or warned of, or no matter."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import CountingNet, mean_square
from graphfsdp.base.hazards import HazardKind
from graphfsdp.optim import FusedAdam
from helpers import assert_same_states, snapshot
from moving_state import HELD, USES, loss_with, refusal_of

NUM_CALLS = 40


def train(make_loss: Callable[[], Any], scope: str, make_model: Any = None) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4) if make_model is None else make_model()
    optim = FusedAdam(model.parameters(), lr=0.01)
    states = []
    with graphfsdp.capture(model, optim, loss_fn=make_loss(), scope=scope) as step:
        for _ in range(NUM_CALLS):
            states.append({"loss": step(torch.randn(3, 4)), **snapshot(model, optim)})
        phase = graphfsdp.Phase.EAGER if scope == "none" else graphfsdp.Phase.REPLAY
        assert step.phase is phase
    return states


def held_and_used() -> Iterator[tuple[str, str]]:
    """Each way to hold a count with a use, which sees a number alone; two ways with all."""
    uses = list(USES)
    for index, held in enumerate(HELD):
        for use in uses if held in ("attribute", "closure") else [uses[index % len(uses)]]:
            yield held, use


@pytest.mark.parametrize(("held", "use"), list(held_and_used()))
def test_a_count_that_one_day_decides_is_refused_by_name(held: str, use: str) -> None:
    make, named = HELD[held]
    error = refusal_of(loss_with(make(), USES[use]))
    assert named in str(error)
    assert "more iterations" in str(error) or "moves in Python" in str(error)
    assert error.source is not None


class Late(CountingNet):
    """Decides in its own forward pass by its own count."""

    def decide(self, y: Tensor) -> Tensor:
        return y * 2 if self.calls > 8 else y


def by_count_of_the_model(model: Any, x: Tensor) -> Tensor:
    loss = mean_square(model, x)
    return loss * 2 if model.calls > 1000 else loss


@pytest.mark.parametrize(("model", "loss_fn"), [(Late, None), (CountingNet, by_count_of_the_model)])
def test_a_count_of_the_model_that_one_day_decides_is_refused_by_name(
    model: type[CountingNet], loss_fn: Any
) -> None:
    error = refusal_of(loss_fn, model())
    assert "calls: " in str(error)
    assert error.kind in (HazardKind.CONTROL_FLOW, HazardKind.BAKED_NUMBER)
    assert error.source is not None


@pytest.mark.parametrize("held", HELD)
def test_a_count_that_decides_nothing_is_warned_of_and_replays_are_right(
    held: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, named = HELD[held]
    with caplog.at_level(logging.WARNING, "graphfsdp"):
        replayed = train(lambda: loss_with(make(), None), "full_iteration")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert named in told[0]
    assert_same_states(train(lambda: loss_with(make(), None), "none"), replayed)
