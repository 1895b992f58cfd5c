"""Measures one case: all contenders in this process, in turns, on the same batches.

Shapes: K = steps.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from graphfsdp.base.collector import without_collector
from graphfsdp.base.nvtx import nvtx_range
from graphfsdp.bench.agreement import Failure, attempt, first_says, group_for, line_up
from graphfsdp.bench.batches import Batch, BatchSource, batch_source
from graphfsdp.bench.clock import Schedule, Window, make_schedule, time_window
from graphfsdp.bench.contenders import Contender, ContenderSpec, GraphFacts, Setting
from graphfsdp.bench.machine import (
    find_peak,
    kernel_roofline,
    model_flops,
    num_parameters,
    operator_roofline,
)
from graphfsdp.bench.profile import profile_contender
from graphfsdp.bench.records import (
    REFERENCE,
    CaseResult,
    ContenderResult,
    InitRecord,
    MemoryRecord,
    NotRun,
    ParityRecord,
    RooflineRecord,
    TimingRecord,
    WorkloadFacts,
)
from graphfsdp.errors import ConfigError

# Three eager iterations, the capture, and two replays; torch.compile compiles in the first.
NUM_WARMUP_STEPS = 6
# Of a profile; the first one gets the profiler itself started.
NUM_PROFILE_STEPS = 4
CUDA_ALLOCATOR = "torch's CUDA allocator, less what other contenders held"
_NUM_PROBES = 2
_NUM_EARLY_STEPS = 10
_NUM_PROFILED = 3
# Of a case's time: when no further contender starts, and no further round.
_START_SHARE, _TIMING_SHARE = 0.5, 0.8

# Told what goes on: a phase, and a contender's name or "".
Say = Callable[[str, str], None]


@dataclass(frozen=True)
class MeasureOptions:
    """How a case is measured.

    ``seconds`` are of the timed region, all contenders together. ``limit_s`` is of the whole case:
    when half of it is over, no contender starts, and when most is, no round. ``excluded`` says of
    contenders that ended a process before, how.
    """

    seconds: float
    data: str | None = None
    random_tokens: bool = False
    roofline: bool = True
    profile: str | None = None
    nsys: bool = False
    excluded: tuple[tuple[str, str], ...] = ()
    limit_s: float = math.inf


@dataclass
class RunningContender:
    """A contender and what has been seen of it so far.

    ``before`` is what a GPU's allocator held before it was built; ``random`` the states of its own
    generators, so that dropout drops the same for every contender; ``losses`` come in pieces of [K]
    float32 on the device.
    """

    spec: ContenderSpec
    contender: Contender
    build_ms: float
    before: MemoryRecord
    random: tuple[Tensor, ...]
    warmup_ms: tuple[float, ...] = ()
    memory: MemoryRecord | None = None
    losses: list[Tensor] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def warm_up(self, batches: Sequence[Batch], device: torch.device) -> None:
        """Time each step with a sync after it; a GPU's peak includes capture and compilation."""
        times = []
        for index, batch in enumerate(batches):
            start = time.perf_counter()
            with self._own_randomness(device):
                self.losses.append(self.contender(batch, index)[None])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() - start) * 1e3)
        self.warmup_ms = tuple(times)
        allocated, reserved = self.before.allocated_bytes, self.before.reserved_bytes
        if allocated is not None and reserved is not None:
            self.memory = MemoryRecord(
                CUDA_ALLOCATOR,
                allocated_bytes=torch.cuda.max_memory_allocated(device) - allocated,
                reserved_bytes=torch.cuda.max_memory_reserved(device) - reserved,
            )

    def time(self, batches: Sequence[Batch], first_step: int, device: torch.device) -> Window:
        losses: list[Tensor] = []

        def make(batch: Batch, index: int) -> Callable[[], None]:
            return lambda: losses.append(self.contender(batch, first_step + index))

        steps = [make(batch, index) for index, batch in enumerate(batches)]
        with self._own_randomness(device):
            window = time_window(steps, device)
        self.losses.append(torch.stack(losses))
        return window

    @contextlib.contextmanager
    def _own_randomness(self, device: torch.device) -> Iterator[None]:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _set_random(self.random, device)
            yield
            self.random = _random_states(device)

    def timing(self) -> TimingRecord:
        return TimingRecord(
            step_ms=tuple(window.step_ms for window in self.windows),
            host_ms=tuple(round(window.host_ms, 6) for window in self.windows),
            cpu_ms=tuple(round(window.cpu_ms, 6) for window in self.windows),
        )

    def init(self, facts: GraphFacts) -> InitRecord:
        compile_ms = None
        if self.spec.compiles:
            usual = statistics.median(self.timing().window_ms)
            compile_ms = max(0.0, sum(self.warmup_ms[:2]) - 2 * usual)
        return InitRecord(
            build_ms=self.build_ms,
            warmup_ms=sum(self.warmup_ms),
            num_warmup_steps=len(self.warmup_ms),
            capture_ms=facts.capture_ms,
            compile_ms=compile_ms,
            num_nodes=facts.num_nodes,
            pool_bytes=facts.pool_bytes,
        )


def build_contender(spec: ContenderSpec, setting: Setting) -> RunningContender:
    device = setting.device
    before = MemoryRecord(CUDA_ALLOCATOR)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = MemoryRecord(
            CUDA_ALLOCATOR,
            allocated_bytes=torch.cuda.memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
        )
    start = time.perf_counter()
    contender = spec.make(setting)
    build_ms = (time.perf_counter() - start) * 1e3
    return RunningContender(spec, contender, build_ms, before, _random_states(device))


def _random_states(device: torch.device) -> tuple[Tensor, ...]:
    of_gpu = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return (torch.get_rng_state(), *of_gpu)


def _set_random(states: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def measure_case(
    setting: Setting, specs: Sequence[ContenderSpec], options: MeasureOptions, say: Say
) -> CaseResult:
    """Every rank calls it, and all get the same result; ConfigError if the reference cannot run."""
    case, source = batch_source(
        setting.case,
        data=options.data,
        random_tokens=options.random_tokens,
        seed=setting.seed,
        device=setting.device,
        rank=setting.ranks.rank,
    )
    setting = dataclasses.replace(setting, case=case)
    excluded = dict(options.excluded)
    not_run = [
        NotRun(spec.name, spec.description, excluded[spec.name])
        for spec in specs
        if spec.name in excluded
    ]
    specs = [spec for spec in specs if spec.name not in excluded]
    say("peak", "")
    flops, formula = model_flops(case, source.make(0))
    facts = WorkloadFacts(
        name=case.workload.name,
        family=case.workload.family,
        dtype=case.dtype,
        batch_size=case.batch_size,
        items_per_sample=case.workload.items_per_sample,
        unit=case.workload.unit,
        data=source.description,
        num_parameters=num_parameters(case),
        flops_per_step=flops,
        flops_formula=formula,
    )
    peak = find_peak(setting.device, case.torch_dtype)
    with group_for(specs, setting):
        bench = _CaseBench(setting, source, options, say, not_run)
        try:
            contenders = bench.run(specs)
        finally:
            bench.close()
    return CaseResult(facts, peak, contenders, tuple(not_run))


class _CaseBench:
    def __init__(
        self,
        setting: Setting,
        source: BatchSource,
        options: MeasureOptions,
        say: Say,
        not_run: list[NotRun],
    ) -> None:
        self._setting, self._source, self._options, self._say = setting, source, options, say
        self._not_run = not_run
        self._running: list[RunningContender] = []
        self._next_step = NUM_WARMUP_STEPS
        self._started = time.monotonic()

    def run(self, specs: Sequence[ContenderSpec]) -> tuple[ContenderResult, ...]:
        self._start(specs)
        schedule = self._probe()
        self._time(schedule)
        line_up(self._setting.ranks, self._setting.device)
        reference = self._reference()
        losses = {item.spec.name: torch.cat(item.losses).cpu() for item in self._running}
        rooflines = self._rooflines()
        self._profile()
        self._mark_for_nsys()
        results = []
        for item in self._running:
            facts = item.contender.graph_facts()
            results.append(
                ContenderResult(
                    name=item.spec.name,
                    description=item.spec.description,
                    init=item.init(facts),
                    timing=item.timing(),
                    parity=compare_losses(losses[reference.spec.name], losses[item.spec.name]),
                    memory=item.memory,
                    roofline=rooflines.get(item.spec.name),
                    notes=facts.notes,
                )
            )
        return tuple(results)

    def _is_late(self, share: float) -> bool:
        """Tell whether that share of the time for the case is over; all ranks agree."""
        late = time.monotonic() - self._started > share * self._options.limit_s
        return first_says(late, self._setting.ranks)

    def close(self) -> None:
        """Free all contenders, also after a failure."""
        for item in self._running:
            item.contender.close()
        self._running.clear()

    def _reference(self) -> RunningContender:
        for item in self._running:
            if item.spec.name == REFERENCE:
                return item
        failed = next(item for item in self._not_run if item.name == REFERENCE)
        raise ConfigError(
            f"{self._setting.case.key}: the reference ({REFERENCE}) cannot run here, so there is "
            f"nothing to compare with: {failed.reason}"
        )

    def _start(self, specs: Sequence[ContenderSpec]) -> None:
        """Those that compile come last, if time is left."""
        batches = self._source.take(0, NUM_WARMUP_STEPS)
        order = sorted(specs, key=lambda spec: spec.compiles)
        for spec in order:
            self._say("warm-up", spec.name)
            if spec.name != REFERENCE and self._is_late(_START_SHARE):
                self._leave_out(spec, Failure("the time for this case was over before", ""))
                continue
            line_up(self._setting.ranks, self._setting.device)
            failure = self._start_one(spec, batches)
            if failure is not None:
                self._leave_out(spec, failure)
        self._reference()
        names = [spec.name for spec in specs]
        self._running.sort(key=lambda item: names.index(item.spec.name))
        self._not_run.sort(key=lambda item: names.index(item.name) if item.name in names else -1)

    def _start_one(self, spec: ContenderSpec, batches: Sequence[Batch]) -> Failure | None:
        """Build and warm up; ranks tell each other after both, before anyone communicates alone."""
        setting = self._setting
        built = attempt(functools.partial(build_contender, spec, setting), setting.ranks)
        if isinstance(built, Failure):
            return built
        warmed = attempt(functools.partial(built.warm_up, batches, setting.device), setting.ranks)
        if isinstance(warmed, Failure):
            built.contender.close()
            return warmed
        self._running.append(built)
        return None

    def _probe(self) -> Schedule:
        step_ms = []
        for item in list(self._running):
            self._say("probe", item.spec.name)
            window = self._window(item, self._source.take(self._next_step, _NUM_PROBES))
            if window is not None:
                step_ms.append(window)
        self._next_step += _NUM_PROBES
        self._reference()
        schedule = make_schedule(step_ms, self._options.seconds)
        return first_says(schedule, self._setting.ranks)

    def _time(self, schedule: Schedule) -> None:
        """The order turns round after each round; where time is nearly over, fewer must do."""
        order = list(self._running)
        for number in range(schedule.num_rounds):
            batches = self._source.take(self._next_step, schedule.num_steps)
            if number and self._is_late(_TIMING_SHARE):
                break
            with without_collector():
                for item in order:
                    if item in self._running:
                        self._say("timing", item.spec.name)
                        self._window(item, batches, keep=True)
            order.reverse()
            self._next_step += schedule.num_steps

    def _window(
        self, item: RunningContender, batches: list[Batch], *, keep: bool = False
    ) -> float | None:
        """Return ms per step; a contender that fails in the window on any rank leaves."""
        device, ranks = self._setting.device, self._setting.ranks
        line_up(ranks, device)
        window = attempt(lambda: item.time(batches, self._next_step, device), ranks)
        if isinstance(window, Failure):
            self._running.remove(item)
            item.contender.close()
            self._leave_out(item.spec, window)
            return None
        if keep:
            item.windows.append(window)
        return window.mean_ms

    def _rooflines(self) -> dict[str, RooflineRecord]:
        found: dict[str, RooflineRecord] = {}
        if not self._options.roofline or self._options.nsys:  # both would listen to the GPU
            return found
        self._say("roofline", "")
        if self._setting.device.type == "cuda":
            batches = self._source.take(self._next_step, _NUM_PROFILED)
            for item in self._running:
                record = kernel_roofline(self._steps(item, batches), item.timing().steps.median)
                if record is not None:
                    found[item.spec.name] = record
            return found
        for item in self._running:
            times = item.contender.operator_us()
            if times:
                # Eager runs the same operators.
                for other in (item, self._reference()):
                    median = other.timing().steps.median
                    found.setdefault(other.spec.name, operator_roofline(times, median))
        return found

    def _steps(
        self, item: RunningContender, batches: Sequence[Batch]
    ) -> list[Callable[[], object]]:
        return [
            functools.partial(item.contender, batch, self._next_step + index)
            for index, batch in enumerate(batches)
        ]

    def _profile(self) -> None:
        if self._options.profile is None:
            return
        self._say("profile", "")
        setting = self._setting
        folder = case_folder(self._options.profile, setting.case.key)
        batches = self._source.take(self._next_step, NUM_PROFILE_STEPS)
        for item in self._running:
            line_up(setting.ranks, setting.device)
            steps = self._steps(item, batches)
            found = attempt(
                functools.partial(self._profile_one, item, steps, folder), setting.ranks
            )
            if isinstance(found, Failure) and setting.ranks.is_first:
                text = f"{item.spec.name} has no profile: {found.reason}\n\n{found.detail}"
                (folder / f"{item.spec.name}.txt").write_text(text, encoding="utf-8")

    def _profile_one(
        self, item: RunningContender, steps: Sequence[Callable[[], object]], folder: Path
    ) -> None:
        if not self._setting.ranks.is_first:
            for step in steps:
                step()
            return
        folder.mkdir(parents=True, exist_ok=True)
        profile_contender(
            steps,
            case=self._setting.case.key,
            contender=item.spec.name,
            device=self._setting.device,
            folder=folder,
            nodes=item.contender.replay_nodes(),
        )

    def _mark_for_nsys(self) -> None:
        """Run some more steps of each contender between cudaProfilerStart and Stop."""
        device, ranks = self._setting.device, self._setting.ranks
        if not self._options.nsys or device.type != "cuda":
            return
        self._say("nsys", "")
        batches = self._source.take(self._next_step, NUM_PROFILE_STEPS)
        torch.cuda.synchronize(device)
        torch.cuda.profiler.start()
        try:
            for item in self._running:
                line_up(ranks, device)
                with nvtx_range(f"{self._setting.case.key}: {item.spec.name}"):
                    for step in self._steps(item, batches):
                        step()
                    line_up(ranks, device)
        finally:
            torch.cuda.synchronize(device)
            torch.cuda.profiler.stop()

    def _leave_out(self, spec: ContenderSpec, failure: Failure) -> None:
        self._not_run.append(NotRun(spec.name, spec.description, failure.reason, failure.detail))


def case_folder(profiles: str, key: str) -> Path:
    return Path(profiles) / key.replace(" ", "-")


def compare_losses(
    reference: Tensor,  # [K] float32
    own: Tensor,  # [K] float32
) -> ParityRecord:
    apart = (reference.double() - own.double()).abs()
    differs = ~((reference == own) | (reference.isnan() & own.isnan()))
    places = differs.nonzero().flatten().tolist()
    largest, early, last = apart.max().item(), apart[:_NUM_EARLY_STEPS].max().item(), own[-1].item()
    return ParityRecord(
        num_steps=len(own),
        max_difference=largest if math.isfinite(largest) else None,
        bit_exact=not places,
        first_difference=places[0] if places else None,
        early_difference=early if math.isfinite(early) else None,
        last_loss=last if math.isfinite(last) else None,
    )
