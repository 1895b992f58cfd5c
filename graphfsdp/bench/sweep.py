"""Runs the cases of a benchmark one after the other, each within what is left of the time."""

import dataclasses
import time
from pathlib import Path

import torch

from graphfsdp.bench.case_child import ChildRequest
from graphfsdp.bench.case_process import CaseFailedError, run_case, run_memory
from graphfsdp.bench.contender import Setting
from graphfsdp.bench.contenders import CONTENDERS, find_contenders
from graphfsdp.bench.measure import MeasureOptions, Say, measure_case
from graphfsdp.bench.memory import can_forget_peak
from graphfsdp.bench.options import BenchOptions
from graphfsdp.bench.records import NOT_ASKED, CaseResult, NotRun
from graphfsdp.bench.result_directory import PROFILES
from graphfsdp.bench.suites import PlannedCase
from graphfsdp.bench.together import first_says
from graphfsdp.config import ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.training.ranks import Ranks

# No case ends in less: Python and torch have to start.
_SHORTEST_CASE_S = 20.0
_NO_LIMIT_S = 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Measures cases; where a launcher has started several ranks, all of them take part.

    Attributes:
        started: ``time.monotonic()`` when the budget began.
        folder: The result directory, where rank 0 keeps profiles; None on other ranks.
    """

    options: BenchOptions
    device: torch.device
    ranks: Ranks
    started: float
    folder: Path | None = None

    @property
    def _profile(self) -> str | None:
        """Where profiles go; None where none was asked for."""
        if not self.options.profile:
            return None
        return str((self.folder or Path()).resolve() / PROFILES)

    def left_s(self) -> float:
        """Return the seconds that are left of the budget."""
        if self.options.budget is None:
            return _NO_LIMIT_S
        return self.options.budget * 60 - (time.monotonic() - self.started)

    def measure(self, planned: PlannedCase, num_left: int, say: Say) -> CaseResult:
        """Measure the speed of one case.

        Args:
            planned: The case.
            num_left: Cases that are to be measured yet, this one included; of the time that is
                left, this one may take three times its share.
            say: Told what goes on.

        Raises:
            CaseFailedError: it cannot be measured; the message says why.
        """
        left_s = first_says(self.left_s(), self.ranks)
        if left_s < _SHORTEST_CASE_S:
            raise CaseFailedError(f"the budget of {self.options.budget:g} min was spent")
        limit_s = min(left_s, max(3 * left_s / num_left, _SHORTEST_CASE_S))
        if self.ranks.launched:
            return with_unasked(self._measure_here(planned, limit_s, say))
        return with_unasked(run_case(self._request(planned), say, limit_s))

    def with_memory(self, planned: PlannedCase, found: CaseResult, say: Say) -> CaseResult:
        """Return the case with the memory of each contender that time is left for, on a CPU."""
        wanted = planned.memory and self.device.type == "cpu" and not self.ranks.launched
        if not wanted or not can_forget_peak():
            return found
        measured = []
        for index, own in enumerate(found.contenders):
            say("memory", own.name, index / len(found.contenders))
            record = None
            if self.left_s() > _SHORTEST_CASE_S:
                request = dataclasses.replace(self._request(planned), contenders=(own.name,))
                record = run_memory(request, self.left_s())
            measured.append(dataclasses.replace(own, memory=record))
        return dataclasses.replace(found, contenders=tuple(measured))

    def _measure_here(self, planned: PlannedCase, limit_s: float, say: Say) -> CaseResult:
        options = self.options
        strategy = ShardingStrategy.parse(options.strategy or ShardingStrategy.OPTIM_GRADS_PARAMS)
        setting = Setting(planned.case, self.device, options.seed, self.ranks, strategy)
        measure = MeasureOptions(
            options.seconds,
            options.data,
            options.random_tokens,
            options.roofline,
            self._profile,
            options.nsys,
            limit_s=limit_s,
        )
        try:
            return measure_case(setting, find_contenders(planned.contenders), measure, say)
        except ConfigError as error:
            raise CaseFailedError(str(error)) from error

    def _request(self, planned: PlannedCase) -> ChildRequest:
        case, options = planned.case, self.options
        return ChildRequest(
            workload=case.workload.name,
            dtype=case.dtype,
            batch_size=case.batch_size,
            contenders=tuple(spec.name for spec in find_contenders(planned.contenders)),
            device=str(self.device),
            seed=options.seed,
            num_threads=options.threads,
            seconds=options.seconds,
            data=options.data,
            random_tokens=options.random_tokens,
            roofline=options.roofline,
            profile=self._profile,
            nsys=options.nsys,
        )


def with_unasked(found: CaseResult) -> CaseResult:
    """Return the case with every contender in it that nobody asked for, so that none is missing."""
    known = {item.name for item in found.contenders} | {item.name for item in found.not_run}
    others = tuple(
        NotRun(spec.name, spec.description, NOT_ASKED)
        for spec in CONTENDERS
        if spec.name not in known
    )
    return dataclasses.replace(found, not_run=(*found.not_run, *others))
