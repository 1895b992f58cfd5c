"""Generators, iterators, clocks, files: refused or warned of, by name."""

import datetime
import itertools
import logging
import os
import queue
import random
import secrets
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import Loss, mean_square, refusal_of
from graphfsdp.optim import FusedAdam

START = time.time()
CLOCK_STARTED, PERF_STARTED = time.monotonic(), time.perf_counter_ns()
TODAY = time.strftime("%j", time.localtime(START))
DAY = datetime.datetime.now()


def doubled_if(decide: Callable[[], Any]) -> Loss:
    """Double the loss where a call says so; its line is where generators are drawn from."""
    return lambda model, x: mean_square(model, x) * (2 if decide() else 1)


STATE, RNG, OWN = np.random.RandomState(1), np.random.default_rng(1), random.Random(1)


def cycle_of_numbers() -> Any:
    while True:
        yield from (1, 2, 3)


COUNT, NUMBERS = itertools.count(), iter(range(1_000))
GENERATOR, ZIPPED = cycle_of_numbers(), zip(itertools.count(), itertools.count(1), strict=False)
WAITING: queue.Queue[int] = queue.Queue()
for _item in range(100):
    WAITING.put(_item)

# What decides, and what the refusal must name: no draw of these has turned the decision yet.
DRAWS: dict[str, tuple[Callable[[], Any], str]] = {
    "random": (lambda: random.random() < 1e-9, "random"),
    "random_choice": (lambda: random.choice([1, 2]) == 3, "random"),
    "own_random": (lambda: OWN.gauss(0, 1) > 99, "OWN"),
    "numpy_uniform": (lambda: np.random.uniform() < 1e-9, "numpy.random"),
    "random_state": (lambda: STATE.rand() < 1e-9, "STATE"),
    "numpy_generator": (lambda: RNG.integers(9) > 10, "RNG"),
    "unseeded": (lambda: np.random.default_rng().random() < 1e-9, "os.urandom"),
    "secrets": (lambda: secrets.randbelow(9) > 10, "os.urandom"),
    "token": (lambda: secrets.token_hex(4) == "", "os.urandom"),
    "uuid": (lambda: uuid.uuid4().int == 0, "os.urandom"),
    "urandom": (lambda: os.urandom(1) == b"", "os.urandom"),
    "system_random": (lambda: random.SystemRandom().random() < 1e-9, "os.urandom"),
    "count": (lambda: next(COUNT) > 1_000, "COUNT"),
    "iterator": (lambda: next(NUMBERS) > 1_000, "NUMBERS"),
    "generator": (lambda: next(GENERATOR) > 5, "GENERATOR"),
    "zip": (lambda: next(ZIPPED)[0] > 1_000, "ZIPPED"),
    "queue": (lambda: WAITING.get() > 90, "WAITING"),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_in_python_is_refused_by_name(name: str) -> None:
    decide, named = DRAWS[name]
    error = refusal_of(doubled_if(decide))
    assert named in str(error)
    assert error.source is not None
    assert error.source.file == (queue.__file__ if name == "queue" else __file__)


BACKWARDS = {"calls": 0}


class Counted(torch.autograd.Function):
    """Counts in its backward pass, which no code of the users' names."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        BACKWARDS["calls"] += 1
        return grad * 2 if BACKWARDS["calls"] > 1_000 else grad


def counted_backward(model: nn.Module, x: Tensor) -> Any:
    return Counted.apply(mean_square(model, x))  # type: ignore[no-untyped-call]


def test_a_count_of_a_backward_pass_that_decides_one_day_is_refused_by_name() -> None:
    assert "'calls' of global variable 'BACKWARDS'" in str(refusal_of(counted_backward))


HERE = Path(__file__)


def opens() -> bool:
    with open(HERE) as file:
        return file.readline() == ""


ASKS: dict[str, Callable[[], Any]] = {
    "os.path.exists": lambda: not os.path.exists(HERE),
    "Path.exists": lambda: not HERE.exists(),
    "file": opens,
    "Path.read_text": lambda: not HERE.read_text(),
    "os.listdir": lambda: not os.listdir(HERE.parent),
    "os.path.getmtime": lambda: os.path.getmtime(HERE) < 0,
    "local_time": lambda: time.localtime() > time.localtime(START + 60_000),
    "text": lambda: time.strftime("%j") != TODAY,
    "time": lambda: time.time() - START > 60_000,
    "monotonic": lambda: time.monotonic() > CLOCK_STARTED + 3_000,
    "nanoseconds": lambda: time.perf_counter_ns() > PERF_STARTED + 3_000 * 10**9,
    "datetime": lambda: datetime.datetime.now() > DAY + datetime.timedelta(days=1),
}


@pytest.mark.parametrize("name", ASKS)
def test_what_is_asked_of_the_system_is_warned_of(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    loss_fn = doubled_if(ASKS[name])
    with graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn) as step:
        for _ in range(5):
            step(torch.ones(3, 4))
        assert step.phase is graphfsdp.Phase.REPLAY
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "was asked" in told[0].getMessage()
    assert __file__ in told[0].getMessage()
