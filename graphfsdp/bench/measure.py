"""Measures one case: all contenders in this process, in turns, on the same batches."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphfsdp.base.collector import without_collector
from graphfsdp.bench.batches import Batch, BatchSource, batch_source
from graphfsdp.bench.clock import Schedule, make_schedule
from graphfsdp.bench.contender import ContenderSpec, Setting
from graphfsdp.bench.facts import WorkloadFacts
from graphfsdp.bench.flops import find_peak, model_flops, num_parameters
from graphfsdp.bench.own_group import group_for
from graphfsdp.bench.parity import compare_losses
from graphfsdp.bench.profile_case import NUM_PROFILE_STEPS, profile_case
from graphfsdp.bench.records import (
    REFERENCE,
    CaseResult,
    ContenderResult,
    NotRun,
    RooflineRecord,
)
from graphfsdp.bench.roofline import kernel_roofline, operator_roofline
from graphfsdp.bench.run_contender import NUM_WARMUP_STEPS, RunningContender, build_contender
from graphfsdp.bench.together import Failure, attempt, first_says, line_up
from graphfsdp.errors import ConfigError

_NUM_PROBES = 2
_NUM_PROFILED = 3
# Of a case's time: when no further contender starts, and no further round.
_START_SHARE, _TIMING_SHARE = 0.5, 0.8

# Told what goes on: a phase, a contender's name or "", and what share of the phase is done.
Say = Callable[[str, str, float], None]


@dataclass(frozen=True)
class MeasureOptions:
    """How a case is measured.

    Attributes:
        seconds: Of the timed region, all contenders together.
        data: Text, as ``graphfsdp train --data`` takes it.
        random_tokens: Uniform tokens instead of text.
        roofline: Also time kernels (GPU) or operators (CPU).
        profile: Folder for profiles of all contenders; None for none.
        nsys: Mark some steps for Nsight Systems.
        excluded: Contenders that ended a process before, and how.
        limit_s: Seconds of the whole case; when half of them are over, no contender starts, and
            when most are, no round.
    """

    seconds: float
    data: str | None = None
    random_tokens: bool = False
    roofline: bool = True
    profile: str | None = None
    nsys: bool = False
    excluded: tuple[tuple[str, str], ...] = ()
    limit_s: float = math.inf


def measure_case(
    setting: Setting, specs: Sequence[ContenderSpec], options: MeasureOptions, say: Say
) -> CaseResult:
    """Measure all contenders of a case; every rank calls it, and all get the same result.

    Raises:
        ConfigError: the case cannot be made, or the reference cannot run.
    """
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
    say("peak", "", 0.0)
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
    """The contenders of a case while they run."""

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
        """Start, time and question all contenders."""
        self._start(specs)
        schedule = self._probe()
        self._time(schedule)
        line_up(self._setting.ranks, self._setting.device)
        reference = self._reference()
        losses = {item.spec.name: torch.cat(item.losses).cpu() for item in self._running}
        rooflines = self._rooflines()
        self._profile()
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
        """Build and warm up every contender; those that compile come last, if time is left."""
        batches = self._source.take(0, NUM_WARMUP_STEPS)
        order = sorted(specs, key=lambda spec: spec.compiles)
        for index, spec in enumerate(order):
            self._say("warm-up", spec.name, index / len(order))
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
        """Time a few steps of each contender to find out how many to run."""
        step_ms = []
        for item in list(self._running):
            self._say("probe", item.spec.name, 0.0)
            window = self._window(item, self._source.take(self._next_step, _NUM_PROBES))
            if window is not None:
                step_ms.append(window)
        self._next_step += _NUM_PROBES
        self._reference()
        schedule = make_schedule(step_ms, self._options.seconds)
        return first_says(schedule, self._setting.ranks)

    def _time(self, schedule: Schedule) -> None:
        """Run rounds of one window each; the order turns round after each of them.

        Where the time for the case is nearly over, fewer rounds must do.
        """
        order = list(self._running)
        for number in range(schedule.num_rounds):
            batches = self._source.take(self._next_step, schedule.num_steps)
            if number and self._is_late(_TIMING_SHARE):
                break
            with without_collector():
                for item in order:
                    if item in self._running:
                        share = number / schedule.num_rounds
                        self._say("timing", item.spec.name, share)
                        self._window(item, batches, keep=True)
            order.reverse()
            self._next_step += schedule.num_steps

    def _window(
        self, item: RunningContender, batches: list[Batch], *, keep: bool = False
    ) -> float | None:
        """Run a window; a contender that fails in it on any rank leaves. Returns ms per step."""
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
        """Return what is known of kernels, by contender."""
        found: dict[str, RooflineRecord] = {}
        if not self._options.roofline or self._options.nsys:  # both would listen to the GPU
            return found
        self._say("roofline", "", 0.0)
        device = self._setting.device
        if device.type == "cuda":
            batches = self._source.take(self._next_step, _NUM_PROFILED)
            for item in self._running:
                steps = [
                    functools.partial(item.contender, batch, self._next_step) for batch in batches
                ]
                median = item.timing().steps.median
                record = kernel_roofline(steps, median)
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

    def _profile(self) -> None:
        """Run some steps under a profiler, where that was asked for."""
        options = self._options
        if options.profile is None and not options.nsys:
            return
        self._say("profile", "", 0.0)
        batches = self._source.take(self._next_step, NUM_PROFILE_STEPS)
        profile_case(
            self._running,
            batches,
            self._next_step,
            self._setting,
            folder=options.profile,
            nsys=options.nsys,
        )

    def _leave_out(self, spec: ContenderSpec, failure: Failure) -> None:
        self._not_run.append(NotRun(spec.name, spec.description, failure.reason, failure.detail))
