"""Measures one case: all contenders in one process, on the same batches.

They take turns in short windows, so that a slow minute hits them all. Shapes: K = steps.
"""

import functools
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.streams import without_collector
from graphfsdp.bench.contenders import (
    Contender,
    ContenderSpec,
    Setting,
    Window,
    find_contenders,
)
from graphfsdp.bench.results import REFERENCE, Row
from graphfsdp.bench.workloads import batch_source
from graphfsdp.data import Batch
from graphfsdp.errors import ConfigError, GraphFSDPError

T = TypeVar("T")

NUM_THREADS = 1  # of torch on a CPU: steps of small models are too short to share
# Three eager iterations, the capture, and two replays; torch.compile compiles in the first.
NUM_WARMUP_STEPS = 6
_NUM_PROBES = 2
MIN_ROUNDS, MAX_ROUNDS = 5, 100
_MIN_STEPS, _MAX_STEPS = 2, 50
_WINDOW_MS = 40.0
_NUM_EARLY_STEPS = 10
# Of a case's time: when no further contender starts, and no further round.
_START_SHARE, _TIMING_SHARE = 0.5, 0.8
_MAX_CHARACTERS = 400  # of a reason
# A contender whose turn is no shorter hangs; compiling a large model takes minutes.
SILENCE_LIMIT_S = 300.0
_KILLED_S = 10.0  # for the system to end what was killed; one deep in a driver cannot be

Turn = Callable[[str], object]  # told whose turn it is


def time_window(steps: Sequence[Callable[[], object]], device: torch.device) -> Window:
    """No host sync between the steps: on a GPU an event after each of them marks its end.

    The event before the first step is recorded on an idle GPU.
    """
    events: list[torch.cuda.Event] = []
    marks = [0] * (len(steps) + 1)
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in marks]
        torch.cuda.synchronize(device)
        events[0].record()
    cpu_start = time.process_time_ns()
    marks[0] = time.perf_counter_ns()
    for index, step in enumerate(steps, start=1):
        step()
        if events:
            events[index].record()
        marks[index] = time.perf_counter_ns()
    cpu_ns = time.process_time_ns() - cpu_start
    step_ms = [(end - start) / 1e6 for start, end in itertools.pairwise(marks)]
    if events:
        events[-1].synchronize()
        step_ms = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    rounded = tuple(float(f"{value:.6g}") for value in step_ms)
    return Window(rounded, cpu_ns / 1e6 / len(steps))


def in_turns(
    measures: Mapping[str, Callable[[], T]], rounds: Iterable[object]
) -> dict[str, list[T]]:
    """The order turns round after each round, so that nobody always follows the same neighbour."""
    found: dict[str, list[T]] = {name: [] for name in measures}
    order = list(measures)
    for _ in rounds:
        with without_collector():
            for name in order:
                found[name].append(measures[name]())
        order.reverse()
    return found


def make_schedule(step_ms: Sequence[float], seconds: float) -> tuple[int, int]:
    """Return how many rounds fit into a time, and steps into a window.

    ``step_ms`` says how long a step of each contender takes. A window has several steps, since its
    first one finds its neighbour's data in the caches, and is long beside the clock's own cost.
    There are enough rounds to see how the ratio scatters.
    """
    all_ms = sum(step_ms)
    num_steps = round(_WINDOW_MS / min(step_ms))
    num_steps = min(num_steps, int(seconds * 1e3 / (2 * MIN_ROUNDS * all_ms)), _MAX_STEPS)
    num_steps = max(num_steps, _MIN_STEPS)
    num_rounds = int(seconds * 1e3 / (num_steps * all_ms))
    return min(max(num_rounds, MIN_ROUNDS), MAX_ROUNDS), num_steps


def measure_case(
    setting: Setting, turn: Turn = lambda _: None, specs: Sequence[ContenderSpec] | None = None
) -> list[Row]:
    """Return a line for each contender; ConfigError if the reference cannot run.

    Every rank calls it. ``specs`` are the case's contenders, where these are not known by name.
    """
    case = setting.case
    facts = {
        "case": case.key,
        "workload": case.workload.name,
        "dtype": case.dtype,
        "batch_size": case.batch_size,
        "items_per_sample": case.workload.items_per_sample,
        "unit": case.workload.unit,
    }
    wanted = find_contenders(case.contenders) if specs is None else specs
    bench = _CaseBench(setting, turn)
    try:
        rows = bench.run(wanted)
    finally:
        bench.close()
        if dist.is_initialized() and not setting.ranks.launched:
            dist.destroy_process_group()
    return [{**facts, **row} for row in rows]


class _CaseBench:
    def __init__(self, setting: Setting, turn: Turn) -> None:
        self._setting, self._turn = setting, turn
        self._batch_of = batch_source(setting.case, setting.device, setting.ranks)
        self._members = setting.ranks
        self._running: dict[str, Contender] = {}
        self._reasons: dict[str, str] = {}  # of those that do not run
        self._started = time.monotonic()

    def run(self, specs: Sequence[ContenderSpec]) -> list[Row]:
        """Those that compile start last, if time is left."""
        for spec in sorted(specs, key=lambda spec: spec.compiles):
            self._start(spec)
        names = [spec.name for spec in specs if spec.name in self._running]
        self._take_turns(names, _NUM_PROBES, range(1))
        self._reference()
        mean_ms = [each.windows[-1].mean_ms for each in self._running.values()]
        schedule = make_schedule(mean_ms, self._setting.seconds)
        num_rounds, num_steps = self._members.gather(schedule)[0]
        # Where time is nearly over, fewer rounds must do.
        rounds = itertools.takewhile(
            lambda number: not number or not self._is_late(_TIMING_SHARE), range(num_rounds)
        )
        self._take_turns(names, num_steps, rounds)
        self._line_up()
        losses = self._reference().all_losses()
        ran = [
            {"contender": name, **_row(self._running[name], losses)}
            for name in names
            if name in self._running
        ]
        reasons = ((each.name, self._reasons.get(each.name)) for each in specs)
        return ran + [{"contender": name, "reason": why} for name, why in reasons if why]

    def close(self) -> None:
        """Free all contenders, also after a failure."""
        for contender in self._running.values():
            contender.close()
        self._running.clear()

    def _is_late(self, share: float) -> bool:
        """Tell whether that share of the time for the case is over; all ranks agree."""
        late = time.monotonic() - self._started > share * self._setting.limit_s
        return self._members.gather(late)[0]

    def _line_up(self) -> None:
        if self._setting.device.type == "cuda":
            torch.cuda.synchronize(self._setting.device)
        if self._setting.ranks.size > 1:
            dist.barrier()

    def _reference(self) -> Contender:
        if REFERENCE not in self._running:
            raise ConfigError(
                f"{self._setting.case.key}: the reference ({REFERENCE}) cannot run here, so there "
                f"is nothing to compare with: {self._reasons[REFERENCE]}"
            )
        return self._running[REFERENCE]

    def _start(self, spec: ContenderSpec) -> None:
        """Build and warm up; ranks tell each other after both, before anyone communicates alone."""
        if spec.name != REFERENCE and self._is_late(_START_SHARE):
            self._reasons[spec.name] = "the time for this case was over before"
            return
        start = time.perf_counter()
        built = self._attempt(spec.name, lambda: spec.make(self._setting))
        if built is not None:
            self._running[spec.name] = built
            self._attempt(spec.name, lambda: self._train(built, NUM_WARMUP_STEPS))
            built.init_ms = (time.perf_counter() - start) * 1e3

    def _train(self, contender: Contender, num_steps: int) -> None:
        """Train so many steps, another batch in each, without a host sync in between."""
        losses: list[Tensor] = []

        def step(number: int, batch: Batch) -> None:
            losses.append(contender(batch, number))

        first = sum(map(len, contender.losses))
        numbers = range(first, first + num_steps)
        batches = [*map(self._batch_of, numbers)]
        torch.manual_seed(first)  # so that dropout drops the same for every contender
        steps = [*map(functools.partial, itertools.repeat(step), numbers, batches)]
        contender.windows.append(time_window(steps, self._setting.device))
        contender.losses.append(torch.stack(losses))

    def _take_turns(self, names: Sequence[str], num_steps: int, rounds: Iterable[int]) -> None:
        def window(name: str) -> None:
            contender = self._running.get(name)
            if contender is not None:  # one that fails in its own leaves
                self._attempt(name, lambda: self._train(contender, num_steps))

        in_turns({name: functools.partial(window, name) for name in names}, rounds)

    def _attempt(self, name: str, act: Callable[[], T]) -> T | None:
        """Do what may fail; a contender for which it fails on any rank leaves, on every rank."""

        def attempt() -> T:
            try:
                return act()
            except Exception as error:  # whatever it dies of is a result: it could not run here
                text = " ".join(str(error).split("\n\n")[0].split())
                text = text[:_MAX_CHARACTERS] + " ..." if len(text) > _MAX_CHARACTERS else text
                raise GraphFSDPError(f"{type(error).__name__}: {text}") from error

        self._line_up()
        self._turn(name)
        try:
            return self._members.together(attempt)
        except GraphFSDPError as error:
            if name in self._running:
                self._running.pop(name).close()
            self._reasons[name] = str(error)
            return None


def _row(contender: Contender, reference: Tensor) -> Row:
    """``reference`` are the losses of the contender that all others are compared with."""
    windows = contender.windows[2:]  # behind warm-up and probe
    return {
        "init_ms": contender.init_ms,
        # Windows of steps with no host sync inside; the CPU's time is per step.
        "step_ms": [list(window.step_ms) for window in windows],
        "cpu_ms": [round(window.cpu_ms, 6) for window in windows],
        **compare_losses(reference, contender.all_losses()),
    }


def compare_losses(
    reference: Tensor,  # [K] float32
    own: Tensor,  # [K] float32
) -> Row:
    """Say how far losses are apart, early too, before rounding errors have had time to grow."""
    apart = (reference.double() - own.double()).abs()
    differs = ~((reference == own) | (reference.isnan() & own.isnan()))
    return {
        "num_steps": len(own),
        "max_difference": _if_finite(apart.max()),
        "bit_exact": not differs.any().item(),
        "early_difference": _if_finite(apart[:_NUM_EARLY_STEPS].max()),
    }


def _if_finite(value: Tensor) -> float | None:
    return value.item() if value.isfinite() else None


def run_case(setting: Setting) -> list[Row]:
    """Measure in a process of its own, which ends at the limit of the case.

    Where a launcher has started several ranks, all of them take part, and no other process.
    ConfigError: it cannot be measured, not within its limit, or a contender ended its process.
    """
    if setting.ranks.launched:
        return measure_case(setting)
    deadline = time.monotonic() + setting.limit_s
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=_tell, args=(sender, setting))
    child.start()
    assert child.pid is not None
    sender.close()  # so that the child's end closes it
    turn = ""
    try:
        while True:
            left_s = deadline - time.monotonic()
            if not receiver.poll(max(min(left_s, SILENCE_LIMIT_S), 0)):
                late = f"there was no progress for {SILENCE_LIMIT_S:.0f} s"
                why = late if left_s > SILENCE_LIMIT_S else "the time for this case was over"
                break
            try:
                told: str | list[Row] | ConfigError = receiver.recv()
            except EOFError:
                child.join(_KILLED_S)
                why = f"its process ended with exit code {child.exitcode}"
                if child.exitcode is not None and child.exitcode < 0:
                    why = f"its process was ended by signal {signal.Signals(-child.exitcode).name}"
                break
            if isinstance(told, list):
                return told
            if isinstance(told, ConfigError):
                raise told
            turn = told
    finally:  # also after Ctrl-C; with all that it has started, which may hold a GPU
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.join(_KILLED_S)
    remedy = f" in the turn of {turn}: name the others with --contender" if turn else ""
    raise ConfigError(why + remedy)


def _tell(sender: Connection, setting: Setting) -> None:
    """Measure, and send whose turn it is, then lines or a ConfigError."""
    os.setsid()
    torch.set_num_threads(NUM_THREADS)
    try:
        sender.send(measure_case(setting, sender.send))
    except ConfigError as error:
        sender.send(ConfigError(str(error)))
