"""Measures one case: all contenders in this process, in turns, on the same batches.

Shapes: K = steps.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collector import without_collector
from graphfsdp.bench.clock import Window, make_schedule, time_window
from graphfsdp.bench.contenders import (
    Contender,
    ContenderSpec,
    Setting,
    find_contenders,
    group_for,
)
from graphfsdp.bench.results import REFERENCE, Row
from graphfsdp.bench.workloads import BatchSource, batch_source
from graphfsdp.data import Batch
from graphfsdp.errors import ConfigError, GraphFSDPError

T = TypeVar("T")

NUM_THREADS = 1  # of torch on a CPU: steps of small models are too short to share
# Three eager iterations, the capture, and two replays; torch.compile compiles in the first.
NUM_WARMUP_STEPS = 6
_NUM_PROBES = 2
_NUM_EARLY_STEPS = 10
# Of a case's time: when no further contender starts, and no further round.
_START_SHARE, _TIMING_SHARE = 0.5, 0.8
_MAX_CHARACTERS = 400  # of a reason

Turn = Callable[[str], object]  # told whose turn it is


class ContenderFailedError(GraphFSDPError):
    """A contender cannot run here, on some rank; the message says why."""


@dataclass
class RunningContender:
    """A contender and what has been seen of it so far.

    ``losses`` come in pieces of [K] float32 on the device.
    """

    name: str
    contender: Contender
    device: torch.device
    init_ms: float  # built and warmed up, capture and compilation included
    losses: list[Tensor] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    @classmethod
    def build(cls, spec: ContenderSpec, setting: Setting) -> "RunningContender":
        start = time.perf_counter()
        contender = spec.make(setting)
        return cls(spec.name, contender, setting.device, (time.perf_counter() - start) * 1e3)

    def warm_up(self, batches: Sequence[Batch]) -> None:
        """With a sync after each step."""
        start = time.perf_counter()
        torch.manual_seed(0)
        for index, batch in enumerate(batches):
            self.losses.append(self.contender(batch, index)[None])
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.init_ms += (time.perf_counter() - start) * 1e3

    def time(self, batches: Sequence[Batch], first_step: int) -> Window:
        losses: list[Tensor] = []

        def step(batch: Batch, number: int) -> None:
            losses.append(self.contender(batch, number))

        torch.manual_seed(first_step)  # so that dropout drops the same for every contender
        steps = [functools.partial(step, each, first_step + n) for n, each in enumerate(batches)]
        window = time_window(steps, self.device)
        self.losses.append(torch.stack(losses))
        return window

    def row(self, reference: Tensor) -> Row:
        """``reference`` are the losses of the contender that all others are compared with."""
        return {
            "contender": self.name,
            "init_ms": self.init_ms,
            # Windows of steps with no host sync inside; the CPU's time is per step.
            "step_ms": [list(window.step_ms) for window in self.windows],
            "cpu_ms": [round(window.cpu_ms, 6) for window in self.windows],
            **compare_losses(reference, self.all_losses()),
            "notes": list(self.contender.notes()),
        }

    def all_losses(self) -> Tensor:  # [K] float32
        return torch.cat(self.losses).cpu()


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
    bench = _CaseBench(setting, batch_source(case, setting.device, setting.ranks), turn)
    with group_for(wanted, setting):
        try:
            rows = bench.run(wanted)
        finally:
            bench.close()
    return [{**facts, **row} for row in rows]


class _CaseBench:
    def __init__(self, setting: Setting, source: BatchSource, turn: Turn) -> None:
        self._setting, self._source, self._turn = setting, source, turn
        self._members = setting.ranks.members
        self._running: dict[str, RunningContender] = {}
        self._reasons: dict[str, str] = {}  # of those that do not run
        self._next_step = NUM_WARMUP_STEPS
        self._started = time.monotonic()

    def run(self, specs: Sequence[ContenderSpec]) -> list[Row]:
        """Those that compile start last, if time is left."""
        batches = self._source.take(0, NUM_WARMUP_STEPS)
        for spec in sorted(specs, key=lambda spec: spec.compiles):
            self._start(spec, batches)
        self._reference()
        names = [spec.name for spec in specs]
        order = [self._running[name] for name in names if name in self._running]
        self._time(order, *self._probe(order))
        self._line_up()
        losses = self._reference().all_losses()
        ran = [item.row(losses) for item in order if item.name in self._running]
        reasons = ((name, self._reasons[name]) for name in names if name in self._reasons)
        return ran + [{"contender": name, "reason": reason} for name, reason in reasons]

    def close(self) -> None:
        """Free all contenders, also after a failure."""
        for item in self._running.values():
            item.contender.close()
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

    def _reference(self) -> RunningContender:
        if REFERENCE not in self._running:
            raise ConfigError(
                f"{self._setting.case.key}: the reference ({REFERENCE}) cannot run here, so there "
                f"is nothing to compare with: {self._reasons[REFERENCE]}"
            )
        return self._running[REFERENCE]

    def _start(self, spec: ContenderSpec, batches: Sequence[Batch]) -> None:
        """Build and warm up; ranks tell each other after both, before anyone communicates alone."""
        if spec.name != REFERENCE and self._is_late(_START_SHARE):
            self._reasons[spec.name] = "the time for this case was over before"
            return
        built = self._attempt(spec.name, lambda: RunningContender.build(spec, self._setting))
        if built is not None:
            self._running[spec.name] = built
            self._attempt(spec.name, lambda: built.warm_up(batches))

    def _probe(self, order: Sequence[RunningContender]) -> tuple[int, int]:
        windows = self._round(order, _NUM_PROBES)
        self._reference()
        schedule = make_schedule([each.mean_ms for each in windows], self._setting.seconds)
        return self._members.gather(schedule)[0]

    def _time(self, order: Sequence[RunningContender], num_rounds: int, num_steps: int) -> None:
        """The order turns round after each round; where time is nearly over, fewer must do."""
        for number in range(num_rounds):
            if number and self._is_late(_TIMING_SHARE):
                break
            with without_collector():
                self._round(order[:: -1 if number % 2 else 1], num_steps, keep=True)

    def _round(
        self, order: Sequence[RunningContender], num_steps: int, *, keep: bool = False
    ) -> list[Window]:
        """Return a window of each contender that still runs; one that fails in its own leaves."""
        batches = self._source.take(self._next_step, num_steps)
        windows = []
        for item in order:
            if item.name in self._running:
                run = functools.partial(item.time, batches, self._next_step)
                window = self._attempt(item.name, run)
                if window is not None:
                    windows.append(window)
                    item.windows += [window] if keep else []
        self._next_step += num_steps
        return windows

    def _attempt(self, name: str, act: Callable[[], T]) -> T | None:
        """Do what may fail; a contender for which it fails on any rank leaves, on every rank."""

        def attempt() -> T:
            try:
                return act()
            except Exception as error:  # whatever it dies of is a result: it could not run here
                text = " ".join(str(error).split("\n\n")[0].split())
                text = text[:_MAX_CHARACTERS] + " ..." if len(text) > _MAX_CHARACTERS else text
                raise ContenderFailedError(f"{type(error).__name__}: {text}") from error

        self._line_up()
        self._turn(name)
        try:
            return self._members.together(attempt)
        except ContenderFailedError as error:
            if name in self._running:
                self._running.pop(name).contender.close()
            self._reasons[name] = str(error)
            return None


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
