"""Python that an iteration moves, draws or asks for: refused, or warned of once, by name."""

import collections
import datetime
import io
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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphfsdp
from counting_net import CountingNet, Loss, mean_square, refusal_of
from graphfsdp import CaptureError
from graphfsdp.optim import FusedAdam
from helpers import Case, assert_same_run, check_against_eager, run
from zoo import features

CPU = torch.device("cpu")
LOG = logging.getLogger("moves")
rows = features(4)


def trained(loss_fn: Loss) -> None:
    """Train until a capture has replayed."""
    model = nn.Linear(4, 4)
    with graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn) as step:
        for _ in range(6):
            step(torch.ones(3, 4))
        assert step.phase is graphfsdp.Phase.REPLAY


class Shows(CountingNet):
    """Looks at what it counts, and decides nothing by it."""

    def decide(self, y: Tensor) -> Tensor:
        self.shown = f"{self.calls}"
        return y * 2 if self.late == 50 else y


class InABuffer(CountingNet):
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


@pytest.mark.parametrize("make", [CountingNet, Shows, InABuffer, SameName])
def test_a_model_that_only_counts_or_decides_for_ever_is_captured(
    make: Callable[[], nn.Module],
) -> None:
    check_against_eager(Case(make, rows), CPU)


CALLS = 0


class Meter:
    """As training loops have them."""

    def __init__(self) -> None:
        self.total = self.count = 0
        self.average = 0.0

    def update(self, value: float) -> None:
        self.total += int(value)
        self.count += 1
        self.average = self.total / self.count


def that_counts() -> Loss:
    calls = total = 0
    counts: Any = collections.Counter(items=0)
    seen: list[float] = []
    meter = Meter()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        global CALLS
        nonlocal calls, total
        CALLS = CALLS + 1
        calls += 1
        total += calls  # which moves as well
        counts["items"] += 1
        seen.append(counts["items"])
        meter.update(3.0)
        return mean_square(model, x)

    return loss_fn


def that_prints() -> Loss:
    state = types.SimpleNamespace(calls=0, lines=0)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        state.calls += 1
        if state.calls % 3 == 0:
            print("step", state.calls)
            LOG.info("step %d", state.calls)
            state.lines += 1
        print(f"{state.calls} calls")
        return mean_square(model, x)

    return loss_fn


def of_losses() -> Loss:
    losses: list[Tensor] = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        losses.append(loss.detach())
        return loss

    return loss_fn


def that_keeps_a_log() -> Loss:
    state = types.SimpleNamespace(calls=0, epoch=0, history=[], log={})

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        state.calls += 1
        state.epoch = state.calls // 5
        state.log["calls"] = state.log["old"] = state.calls
        del state.log["old"]
        if state.calls % 5 == 0:
            state.history.append(state.calls)
            state.log["last"] = state.calls
        return mean_square(model, x)

    return loss_fn


# What only counts, logs or collects, and how the warning names it.
HARMLESS: dict[str, tuple[Callable[[], Loss], tuple[str, ...]]] = {
    "counts": (
        that_counts,
        (
            *("'CALLS'", "variable 'calls'", "'total'", "'items' of closure variable 'counts'"),
            *("variable 'seen'", "'count' of closure variable 'meter'"),
        ),
    ),
    "prints": (that_prints, ("'calls' of closure variable 'state'",)),
    "losses": (of_losses, ("losses",)),
    "log": (that_keeps_a_log, ("'calls' of closure variable 'state'",)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_decides_nothing_is_warned_of_once_and_replays_are_right(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, named = HARMLESS[name]
    cases = [Case(lambda: nn.Linear(4, 4), rows, make()) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "graphfsdp"):
        replayed = run(cases[1], "full_iteration", CPU)
    told = [record.getMessage() for record in caplog.records if record.name == "graphfsdp"]
    assert len(told) == 1
    assert "stands still from now on" in told[0]
    assert all(each in told[0] for each in named), told
    assert replayed.report.num_calls["replay"] == 10
    assert_same_run(run(cases[0], "none", CPU), replayed)


STATE: Any = types.SimpleNamespace(
    calls=0, table={"calls": 0, "rate": 1.0}, rate=1.0, layer=nn.Dropout(0.0), kept=[1.0]
)


def twice(loss: Tensor, calls: int) -> Tensor:
    return loss * 2 if calls > 1_000 else loss


def returned() -> int:
    calls: int = STATE.calls
    return calls


def prints_and_more(loss: Tensor) -> Tensor:
    if STATE.calls % 1_000_000 == 0:
        print("a million")
        loss.zero_()
    return loss


def sets_a_rate(loss: Tensor) -> Tensor:
    if STATE.calls > 1_000:
        STATE.rate = 0.5
    return loss.mul(STATE.rate)


def sets_a_rate_by_another(loss: Tensor) -> Tensor:
    if STATE.calls % 1_000 == 0:
        STATE.table["rate"] *= 0.5
    STATE.rate = STATE.table["rate"]
    return loss.mul(STATE.rate)


def sets_what_torch_reads(loss: Tensor) -> Tensor:
    if STATE.calls > 1_000:
        STATE.layer.p = 0.5
    dropped: Tensor = STATE.layer(loss)
    return dropped


def adds_to_a_list(loss: Tensor) -> Tensor:
    if STATE.calls > 1_000:
        STATE.kept.append(0.5)
    return loss.mul(STATE.kept[-1])


def prints_a_local_variable(loss: Tensor) -> Tensor:
    calls = STATE.calls
    print(calls)
    return loss


def by_a_walrus(loss: Tensor) -> Tensor:
    STATE.rate = calls = STATE.calls
    return loss * 2 if (later := calls) and later > 1_000 else loss


def gives_to_what_is_called_like_a_container(loss: Tensor) -> Tensor:
    Halving.update(loss, STATE.calls > 1_000)
    return loss


class Halving:
    @staticmethod
    def update(loss: Tensor, is_late: bool) -> None:
        if is_late:
            loss *= 0.5


# What makes more of a count than that, after it was moved; or of what the count has moved.
FOLLOWS: dict[str, Callable[[Tensor], Any]] = {
    "branch": lambda loss: loss * 2 if STATE.calls > 1_000 else loss,
    "factor": lambda loss: loss * max(STATE.calls, 10**9),
    "argument": lambda loss: twice(loss, STATE.calls),
    "returned": lambda loss: loss * (2 if returned() > 1_000 else 1),
    "item": lambda loss: loss * (2 if STATE.table["calls"] > 1_000 else 1),
    "loop": lambda loss: sum(loss for _ in range(min(STATE.calls, 1))),
    "branch that does more than to print": prints_and_more,
    "rate that is set late": sets_a_rate,
    "rate that is set by another": sets_a_rate_by_another,
    "what torch reads": sets_what_torch_reads,
    "list that grows late": adds_to_a_list,
    "name in an expression": by_a_walrus,
    "local variable that is printed": prints_a_local_variable,
    "first call": lambda loss: loss * 2 if STATE.calls == 1 else loss,
    "method called like a container's": gives_to_what_is_called_like_a_container,
}


def counting(follows: Callable[[Tensor], Any]) -> Loss:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        STATE.calls += 1
        STATE.table["calls"] += 1
        loss: Tensor = follows(mean_square(model, x))
        return loss

    return loss_fn


@pytest.mark.parametrize("name", FOLLOWS)
def test_what_follows_from_a_count_is_refused_with_its_line(name: str) -> None:
    error = refusal_of(counting(FOLLOWS[name]))
    assert "calls" in str(error)
    assert "reads it for more" in str(error)
    assert error.source is not None
    assert error.source.file == __file__


class Remakes(nn.Module):
    """Makes its containers anew in each call, and reads what it has put into them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.losses: list[Tensor] = []
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        self.losses = []
        self.losses.append(hidden.square().mean())
        self.losses.append(hidden.sin().mean())
        self.kept = {"losses": [self.losses[0], (self.losses[1],)], "factor": 2.0}
        loss: Tensor = self.kept["losses"][0] * self.kept["factor"] + self.kept["losses"][1][0]
        return loss


def test_containers_that_are_made_anew_are_no_state(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(Remakes, rows)
    expected = run(case, "none", CPU)
    for audit in (0, 2):
        assert_same_run(expected, run(case, "full_iteration", CPU, audit=audit))
    assert "stands still" not in caplog.text


def test_progress_that_an_iteration_shows_is_none_of_it() -> None:
    with Progress(console=Console(file=io.StringIO())) as progress:
        task = progress.add_task("training", total=10)

        def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
            progress.advance(task)
            return mean_square(model, x)

        trained(loss_fn)


NUM_OPS = [0]


class Counts(TorchDispatchMode):
    """Counts operators, as profilers of people's own do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        NUM_OPS[0] += 1
        return func(*args, **(kwargs or {})) if NUM_OPS[0] < 1_000_000 else None


def test_what_a_mode_around_the_loop_counts_is_none_of_the_iterations() -> None:
    with Counts():  # type: ignore[no-untyped-call]
        trained(mean_square)
    assert NUM_OPS[0]


def test_a_refused_capture_leaves_what_it_has_moved_as_it_was() -> None:
    state = types.SimpleNamespace(calls=0, seen=[], table={"calls": 0})
    state.recent = collections.OrderedDict.fromkeys(range(2))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        state.calls += 1
        state.seen.append(state.calls)
        state.table["calls"] += 1
        state.recent[state.recent.popitem(last=False)[0] + 2] = None
        Shared.calls += 1
        loss = mean_square(model, x)
        return loss * 2 if state.calls > 1_000 else loss

    class Shared:
        calls = 0

    model = nn.Linear(4, 4)
    seen, table = state.seen, state.table
    with graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn) as step:
        for _ in range(3):
            step(torch.ones(3, 4))
        for _ in range(2):
            with pytest.raises(CaptureError):
                step(torch.ones(3, 4))
    assert (state.calls, state.seen, state.table) == (3, [1, 2, 3], {"calls": 3})
    assert state.seen is seen
    assert state.table is table
    assert Shared.calls == 3
    assert list(state.recent) == [3, 4]


def test_a_check_accepts_what_only_counts_and_warns_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, loss_fn = nn.Linear(4, 4), that_counts()
    optim = FusedAdam(model.parameters())
    assert graphfsdp.check(model, optim, torch.ones(3, 4), loss_fn=loss_fn, target="cpu").ok
    assert "'count' of" in caplog.text


START = time.time()
CLOCK_STARTED, PERF_STARTED = time.monotonic(), time.perf_counter_ns()
TODAY = time.strftime("%j", time.localtime(START))
DAY = datetime.datetime.now()


def doubled_if(decide: Callable[[], Any]) -> Loss:
    """Double the loss where a call says so; its line is where generators are drawn from."""
    return lambda model, x: mean_square(model, x) * (2 if decide() else 1)


RANDOM_STATE, RNG, OWN = np.random.RandomState(1), np.random.default_rng(1), random.Random(1)


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
    "random_state": (lambda: RANDOM_STATE.rand() < 1e-9, "RANDOM_STATE"),
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
