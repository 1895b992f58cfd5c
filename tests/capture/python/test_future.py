"""Nothing silent: Python that an iteration moves is refused by name, or warned of, or no matter."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
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
