"""Generators, iterators, clocks: refused or warned of, by name."""

import collections
import datetime
import enum
import itertools
import logging
import os
import queue
import random
import secrets
import time
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import mean_square
from graphfsdp import CaptureError, VerificationError
from graphfsdp.optim import FusedAdam
from moving_state import loss_with, of_closure, refusal_of

Loss = Callable[[nn.Module, Tensor], Tensor]
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


COUNT, CYCLE, NUMBERS = itertools.count(), itertools.cycle([1, 2, 3]), iter(range(1_000))
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
    "unseeded": (lambda: np.random.default_rng().random() < 1e-9, "random.SystemRandom"),
    "secrets": (lambda: secrets.randbelow(9) > 10, "secrets"),
    "token": (lambda: secrets.token_hex(4) == "", "secrets.token_hex"),
    "uuid": (lambda: uuid.uuid4().int == 0, "uuid.uuid4"),
    "urandom": (lambda: os.urandom(1) == b"", "os.urandom"),
    "system_random": (lambda: random.SystemRandom().random() < 1e-9, "random.SystemRandom"),
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
    assert error.source.file == __file__


def of_stages(kind: Any) -> Callable[[], bool]:
    stages = list(kind)
    state = types.SimpleNamespace(stage=stages[0])

    def decide() -> bool:
        state.stage = stages[min(stages.index(state.stage) + 1, 8)]
        return state.stage is stages[7]

    return decide


def of_an_order() -> Callable[[], bool]:
    table = collections.OrderedDict((index, index == 7) for index in range(20))

    def decide() -> bool:
        table.move_to_end(next(iter(table)))
        return table[next(iter(table))]

    return decide


def of_functions() -> Callable[[], bool]:
    state = types.SimpleNamespace()

    def step() -> bool:
        state.step = steps[min(steps.index(state.step) + 1, 8)]
        return state.step is steps[7]

    codes = [step.__code__.replace(co_qualname=f"step_{index}") for index in range(9)]
    steps = [types.FunctionType(code, globals(), closure=step.__closure__) for code in codes]
    state.step = steps[0]
    return lambda: state.step()


def of_classes() -> Callable[[], bool]:
    kinds = [type(f"Kind{index}", (), {}) for index in range(9)]
    state = types.SimpleNamespace(kind=kinds[0]())

    def decide() -> bool:
        state.kind = kinds[min(kinds.index(type(state.kind)) + 1, 8)]()
        return type(state.kind) is kinds[7]

    return decide


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


def test_a_count_of_a_backward_pass_is_refused_by_name() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = Counted.apply(mean_square(model, x))  # type: ignore[no-untyped-call]
        return loss

    assert "BACKWARDS['calls']: " in str(refusal_of(loss_fn))


NAMES = [f"stage_{index}" for index in range(9)]
# States without a number that moves, and what the refusal must name.
STAGES: dict[str, tuple[Callable[[], Callable[[], bool]], str]] = {
    "enum": (lambda: of_stages(enum.Enum("Stage", NAMES)), "state.stage: <Stage.stage_3: 4> -> "),
    "int_enum": (lambda: of_stages(enum.IntEnum("Stage", NAMES)), "state.stage: "),
    "str_enum": (lambda: of_stages(enum.StrEnum("Stage", NAMES)), "state.stage: "),
    "order_of_a_dict": (of_an_order, "keys of table: (3, 4, 5"),
    "function": (of_functions, "state.step: 'step_3 of line"),
    "class": (of_classes, "state.kind: 'Kind3' -> 'Kind"),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_state_that_decides_one_day_is_refused_by_name(name: str) -> None:
    make, named = STAGES[name]
    assert named in str(refusal_of(doubled_if(make())))


class Watch:
    def __init__(self) -> None:
        self.now = time.perf_counter


WATCH = Watch()


def by_default(now: Callable[[], float] = time.monotonic) -> bool:
    return now() > CLOCK_STARTED + 3_000


def by_closure() -> Callable[[], bool]:
    now = time.time
    return lambda: now() - START > 60_000


CLOCKS: dict[str, Callable[[], Any]] = {
    "default": by_default,
    "closure": by_closure(),
    "attribute": lambda: WATCH.now() > PERF_STARTED / 10**9 + 3_000,
    "local_time": lambda: time.localtime() > time.localtime(START + 60_000),
    "text": lambda: time.strftime("%j") != TODAY,
    "time": lambda: time.time() - START > 60_000,
    "monotonic": lambda: time.monotonic() > CLOCK_STARTED + 3_000,
    "nanoseconds": lambda: time.perf_counter_ns() > PERF_STARTED + 3_000 * 10**9,
    "datetime": lambda: datetime.datetime.now() > DAY + datetime.timedelta(days=1),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_a_clock_that_one_day_decides_is_refused_and_another_is_warned_of(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = refusal_of(doubled_if(CLOCKS[name]))
    assert "reads the clock" in str(error)
    assert error.source is not None

    def looks(model: nn.Module, x: Tensor) -> Tensor:
        time.perf_counter()
        return mean_square(model, x)

    model = nn.Linear(4, 4)
    with graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=looks) as step:
        for _ in range(5):
            step(torch.ones(3, 4))
        assert step.phase is graphfsdp.Phase.REPLAY
    assert "time.perf_counter" in caplog.text


def test_what_stops_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    losses: list[Tensor] = []

    def keeps(model: nn.Module, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        losses.append(loss.detach())
        return loss

    model = nn.Linear(4, 4)
    with graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=keeps) as step:
        for _ in range(20):
            step(torch.ones(3, 4))
    assert len(losses) == 4  # Python was put back after each rehearsal, into the same objects
    assert keeps.__closure__ is not None
    assert [cell.cell_contents for cell in keeps.__closure__] == [losses]
    assert keeps.__closure__[0].cell_contents is losses
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "losses grew by 1 entry" in told[0].getMessage()


def test_a_verification_whose_eager_side_counts_on_names_what_moves() -> None:
    state = types.SimpleNamespace(calls=0, bound=10**9)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        state.calls += 1
        return mean_square(model, x) * (2 if state.calls > state.bound else 1)

    model = nn.Linear(4, 4)
    with graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn) as step:
        for _ in range(5):
            step(torch.ones(3, 4))
        step.verify(3, advance_python=True)
        # Around all guards, as what no snapshot can see would.
        vars(state)["calls"] = 10**9 - 1
        step.verify(1)
        weight = model.weight.detach().clone()
        with pytest.raises(VerificationError, match=r"state\.calls: 999999999 -> 1000000001"):
            step.verify(3, advance_python=True)
        assert torch.equal(model.weight, weight)
        assert state.calls == 10**9 - 1


def test_the_check_says_the_same_without_training(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    optim = FusedAdam(model.parameters())
    before = model.weight.detach().clone()

    def late(loss: Tensor, count: int) -> Tensor:
        return loss * 2 if count > 1_000 else loss

    refused = graphfsdp.check(
        model, optim, torch.ones(3, 4), loss_fn=loss_with(of_closure(), late), target="cpu"
    )
    assert [hazard.op for hazard in refused.hazards] == ["aten.mul.Tensor"]
    assert "calls: " in refused.hazards[0].why
    drawn = graphfsdp.check(
        model, optim, torch.ones(3, 4), loss_fn=doubled_if(DRAWS["numpy_uniform"][0]), target="cpu"
    )
    assert "numpy.random" in drawn.hazards[0].why
    assert "stands still" not in caplog.text
    harmless = loss_with(of_closure(), None)
    assert graphfsdp.check(model, optim, torch.ones(3, 4), loss_fn=harmless, target="cpu").ok
    assert "calls: " in caplog.text
    assert torch.equal(model.weight, before)


def test_an_error_that_comes_one_day_is_a_difference() -> None:
    def stops(loss: Tensor, count: int) -> Tensor:
        assert count < 500, "enough"
        return loss

    error = refusal_of(loss_with(of_closure(), stops))
    assert "raises AssertionError: enough" in str(error)
    with pytest.raises(CaptureError):
        raise error
