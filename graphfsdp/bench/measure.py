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
from graphfsdp.bench.machine import model_flops, num_parameters
from graphfsdp.bench.results import REFERENCE, Row
from graphfsdp.bench.workloads import BatchSource, batch_source
from graphfsdp.data import Batch
from graphfsdp.errors import ConfigError, GraphFSDPError
from graphfsdp.training.metrics import peak_of
from graphfsdp.training.ranks import Ranks

T = TypeVar("T")

NUM_THREADS = 1  # of torch on a CPU: steps of small models are too short to share
# Three eager iterations, the capture, and two replays; torch.compile compiles in the first.
NUM_WARMUP_STEPS = 6
_NUM_PROBES = 2
_NUM_EARLY_STEPS = 10
# Of a case's time: when no further contender starts, and no further round.
_START_SHARE, _TIMING_SHARE = 0.5, 0.8
_MAX_CHARACTERS = 400  # of a reason


class ContenderFailedError(GraphFSDPError):
    """A contender cannot run here, on some rank; the message says why."""


def together(make: Callable[[], T], ranks: Ranks) -> T:
    """Run what may fail; where it fails on any rank, every rank raises ContenderFailedError."""

    def attempt() -> T:
        try:
            return make()
        except Exception as error:  # whatever it dies of is a result: it could not run here
            text = " ".join(str(error).split("\n\n")[0].split())
            text = text[:_MAX_CHARACTERS] + " ..." if len(text) > _MAX_CHARACTERS else text
            raise ContenderFailedError(f"{type(error).__name__}: {text}") from error

    return ranks.members.together(attempt)


def line_up(ranks: Ranks, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if ranks.size > 1:
        dist.barrier()


Turn = Callable[[str], object]  # told whose turn it is


@dataclass
class RunningContender:
    """A contender and what has been seen of it so far.

    ``before`` is what a GPU's allocator held before it was built, allocated and reserved;
    ``losses`` come in pieces of [K] float32 on the device.
    """

    spec: ContenderSpec
    contender: Contender
    build_ms: float
    before: tuple[int, int]
    warmup_ms: float = 0.0
    memory_bytes: tuple[int, int] | None = None  # of a GPU's allocator: allocated, reserved
    losses: list[Tensor] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def warm_up(self, batches: Sequence[Batch], device: torch.device) -> None:
        """With a sync after each step; a GPU's peak includes capture and compilation."""
        start = time.perf_counter()
        torch.manual_seed(0)
        for index, batch in enumerate(batches):
            self.losses.append(self.contender(batch, index)[None])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.warmup_ms = (time.perf_counter() - start) * 1e3
        if device.type == "cuda":
            allocated, reserved = self.before
            self.memory_bytes = (
                torch.cuda.max_memory_allocated(device) - allocated,
                torch.cuda.max_memory_reserved(device) - reserved,
            )

    def time(self, batches: Sequence[Batch], first_step: int, device: torch.device) -> Window:
        losses: list[Tensor] = []

        def step(batch: Batch, number: int) -> None:
            losses.append(self.contender(batch, number))

        torch.manual_seed(first_step)  # so that dropout drops the same for every contender
        steps = [functools.partial(step, each, first_step + n) for n, each in enumerate(batches)]
        window = time_window(steps, device)
        self.losses.append(torch.stack(losses))
        return window

    def row(self, reference: Tensor) -> Row:
        """``reference`` are the losses of the contender that all others are compared with."""
        report = self.contender.report()
        allocated, reserved = self.memory_bytes or (None, None)
        return {
            "contender": self.spec.name,
            "description": self.spec.description,
            # Before the timed region; the warm-up has capture and compilation in it.
            "build_ms": self.build_ms,
            "warmup_ms": self.warmup_ms,
            "capture_ms": report and report.capture_ms,
            "num_nodes": report and report.num_nodes,
            "pool_bytes": report and report.pool_bytes,
            # Windows of steps with no host sync inside; host's and CPU's time are per step.
            "step_ms": [list(window.step_ms) for window in self.windows],
            "host_ms": [round(window.host_ms, 6) for window in self.windows],
            "cpu_ms": [round(window.cpu_ms, 6) for window in self.windows],
            **compare_losses(reference, self.all_losses()),
            "memory_bytes": allocated,
            "reserved_bytes": reserved,
            "notes": list(self.contender.notes()),
        }

    def all_losses(self) -> Tensor:  # [K] float32
        return torch.cat(self.losses).cpu()


def build_contender(spec: ContenderSpec, setting: Setting) -> RunningContender:
    device = setting.device
    before = (0, 0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    start = time.perf_counter()
    contender = spec.make(setting)
    build_ms = (time.perf_counter() - start) * 1e3
    return RunningContender(spec, contender, build_ms, before)


def measure_case(
    setting: Setting, turn: Turn = lambda _: None, specs: Sequence[ContenderSpec] | None = None
) -> list[Row]:
    """Return a line for each contender; ConfigError if the reference cannot run.

    Every rank calls it. ``specs`` are the case's contenders, where these are not known by name.
    """
    case = setting.case
    source = batch_source(case, setting.device, setting.ranks)
    flops, formula = model_flops(case, source.make(0))
    facts = {
        "case": case.key,
        "workload": case.workload.name,
        "dtype": case.dtype,
        "batch_size": case.batch_size,
        "items_per_sample": case.workload.items_per_sample,
        "unit": case.workload.unit,
        "data": source.description,
        "num_parameters": num_parameters(case),
        "flops_per_step": flops,
        "flops_formula": formula,
        "stated_tflops": peak_of(setting.device, case.torch_dtype),
    }
    wanted = find_contenders(case.contenders) if specs is None else specs
    bench = _CaseBench(setting, source, turn)
    with group_for(wanted, setting):
        try:
            rows = bench.run(wanted)
        finally:
            bench.close()
    return [{**facts, **row} for row in (*rows, *bench.not_run)]


class _CaseBench:
    def __init__(self, setting: Setting, source: BatchSource, turn: Turn) -> None:
        self._setting, self._source, self._turn = setting, source, turn
        self.not_run: list[Row] = []
        self._running: list[RunningContender] = []
        self._next_step = NUM_WARMUP_STEPS
        self._started = time.monotonic()

    def run(self, specs: Sequence[ContenderSpec]) -> list[Row]:
        self._start(specs)
        self._time(*self._probe())
        line_up(self._setting.ranks, self._setting.device)
        losses = self._reference().all_losses()
        return [item.row(losses) for item in self._running]

    def _is_late(self, share: float) -> bool:
        """Tell whether that share of the time for the case is over; all ranks agree."""
        late = time.monotonic() - self._started > share * self._setting.limit_s
        return self._setting.ranks.members.gather(late)[0]

    def close(self) -> None:
        """Free all contenders, also after a failure."""
        for item in self._running:
            item.contender.close()
        self._running.clear()

    def _reference(self) -> RunningContender:
        for item in self._running:
            if item.spec.name == REFERENCE:
                return item
        failed = next(row for row in self.not_run if row["contender"] == REFERENCE)
        raise ConfigError(
            f"{self._setting.case.key}: the reference ({REFERENCE}) cannot run here, so there is "
            f"nothing to compare with: {failed['reason']}"
        )

    def _start(self, specs: Sequence[ContenderSpec]) -> None:
        """Those that compile come last, if time is left."""
        batches = self._source.take(0, NUM_WARMUP_STEPS)
        for spec in sorted(specs, key=lambda spec: spec.compiles):
            self._turn(spec.name)
            try:
                self._start_one(spec, batches)
            except ContenderFailedError as error:
                self._leave_out(spec, str(error))
        self._reference()
        names = [spec.name for spec in specs]
        self._running.sort(key=lambda item: names.index(item.spec.name))
        self.not_run.sort(key=lambda row: names.index(row["contender"]))

    def _start_one(self, spec: ContenderSpec, batches: Sequence[Batch]) -> None:
        """Build and warm up; ranks tell each other after both, before anyone communicates alone."""
        setting = self._setting
        if spec.name in setting.excluded:
            raise ContenderFailedError(setting.excluded[spec.name])
        if spec.name != REFERENCE and self._is_late(_START_SHARE):
            raise ContenderFailedError("the time for this case was over before")
        line_up(setting.ranks, setting.device)
        built = together(lambda: build_contender(spec, setting), setting.ranks)
        try:
            together(lambda: built.warm_up(batches, setting.device), setting.ranks)
        except ContenderFailedError:
            built.contender.close()
            raise
        self._running.append(built)

    def _probe(self) -> tuple[int, int]:
        step_ms = []
        for item in list(self._running):
            self._turn(item.spec.name)
            window = self._window(item, self._source.take(self._next_step, _NUM_PROBES))
            if window is not None:
                step_ms.append(window)
        self._next_step += _NUM_PROBES
        self._reference()
        schedule = make_schedule(step_ms, self._setting.seconds)
        return self._setting.ranks.members.gather(schedule)[0]

    def _time(self, num_rounds: int, num_steps: int) -> None:
        """The order turns round after each round; where time is nearly over, fewer must do."""
        order = list(self._running)
        for number in range(num_rounds):
            batches = self._source.take(self._next_step, num_steps)
            if number and self._is_late(_TIMING_SHARE):
                break
            with without_collector():
                for item in order:
                    if item in self._running:
                        self._turn(item.spec.name)
                        self._window(item, batches, keep=True)
            order.reverse()
            self._next_step += num_steps

    def _window(
        self, item: RunningContender, batches: list[Batch], *, keep: bool = False
    ) -> float | None:
        """Return ms per step; a contender that fails in the window on any rank leaves."""
        device, ranks = self._setting.device, self._setting.ranks
        line_up(ranks, device)
        try:
            window = together(lambda: item.time(batches, self._next_step, device), ranks)
        except ContenderFailedError as error:
            self._running.remove(item)
            item.contender.close()
            self._leave_out(item.spec, str(error))
            return None
        if keep:
            item.windows.append(window)
        return window.mean_ms

    def _leave_out(self, spec: ContenderSpec, reason: str) -> None:
        facts = {"contender": spec.name, "description": spec.description}
        self.not_run.append({**facts, "reason": reason})


def compare_losses(
    reference: Tensor,  # [K] float32
    own: Tensor,  # [K] float32
) -> Row:
    """Say how far losses are apart, early too, before rounding errors have had time to grow."""
    apart = (reference.double() - own.double()).abs()
    differs = ~((reference == own) | (reference.isnan() & own.isnan()))
    places = differs.nonzero().flatten().tolist()
    return {
        "num_steps": len(own),
        "max_difference": _if_finite(apart.max()),
        "bit_exact": not places,
        "first_difference": places[0] if places else None,
        "early_difference": _if_finite(apart[:_NUM_EARLY_STEPS].max()),
        "last_loss": _if_finite(own[-1]),
    }


def _if_finite(value: Tensor) -> float | None:
    return value.item() if value.isfinite() else None
