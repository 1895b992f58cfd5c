"""Two results of ``graphfsdp bench`` beside each other: ratios that a machine's mood leaves alone.

Times of two runs do not tell a slower program from a slower hour. What does is how many times as
fast as eager each contender was, since the two took turns: that ratio is formed round by round
inside each file, and the files' ratios are compared.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import fields

from graphfsdp.bench.comparison import Change, Comparison, Side, Verdict
from graphfsdp.bench.records import (
    NOT_ASKED,
    REFERENCE,
    BenchResult,
    CaseResult,
    ContenderResult,
)
from graphfsdp.bench.spread import Spread, quantile
from graphfsdp.errors import ConfigError

DEFAULT_TOLERANCE = 0.05
# What makes two machines two machines. Versions and commits are what one wants to compare.
MACHINE_FIELDS = (
    *("device", "gpu", "gpu_memory_bytes", "compute_capability", "system", "cpu", "num_cpus"),
    *("num_threads", "num_ranks", "backend"),
)
CHANGED_FIELDS = ("commit", "python", "torch", "driver", "cuda", "clock_mhz", "power_limit_w")
_NUM_RESAMPLES = 2000
_INTERVAL = (0.025, 0.975)


def compare(
    old: BenchResult,
    new: BenchResult,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    base: str = REFERENCE,
    other_machine: bool = False,
) -> Comparison:
    """Compare two results.

    Args:
        old: What was.
        new: What is.
        tolerance: Part of a speed-up that may be lost, such as 0.05.
        base: Contender that speed-ups are of.
        other_machine: Compare runs of different machines, too.

    Raises:
        ConfigError: they did not measure the same thing, or not on the same machine; the message
            names what differs.
    """
    if not 0 <= tolerance < 1:
        raise ConfigError(f"--tolerance must be in [0, 1), got {tolerance:g}")
    machines = _differences(old, new, MACHINE_FIELDS)
    if machines and not other_machine:
        told = "; ".join(f"{name} {change}" for name, change in machines.items())
        raise ConfigError(
            f"the two results were measured on different machines: {told}. Remedy: measure both "
            "on one, or give --other-machine, which still compares ratios but no times"
        )
    pairs = [(case, new.find(case.workload.key)) for case in old.cases]
    common = [(mine, theirs) for mine, theirs in pairs if theirs is not None]
    if not common:
        raise ConfigError(
            f"the two results have no case in common: the first has {_keys(old.cases)}; the "
            f"second has {_keys(new.cases)}. Remedy: measure the same workloads"
        )
    changes: list[Change] = []
    for mine, theirs in common:
        _refuse_other_work(mine, theirs)
        changes += _case_changes(mine, theirs, base, tolerance)
    if not any(change.ratio is not None for change in changes):
        raise ConfigError(
            f"no contender beside {base!r} ran in both results. Remedy: give another --base, or "
            "measure more contenders"
        )
    known = {mine.workload.key for mine, _ in common}
    return Comparison(
        base=base,
        tolerance=tolerance,
        changes=tuple(changes),
        only_old=_others(old.cases, known),
        only_new=_others(new.cases, known),
        environment=machines | _differences(old, new, CHANGED_FIELDS) | _versions(old, new),
        same_machine=not machines,
    )


def _others(cases: Sequence[CaseResult], known: set[str]) -> tuple[str, ...]:
    return tuple(case.workload.key for case in cases if case.workload.key not in known)


def _keys(cases: Sequence[CaseResult]) -> str:
    return ", ".join(case.workload.key for case in cases) or "none"


def _differences(old: BenchResult, new: BenchResult, names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        before, after = getattr(old.environment, name), getattr(new.environment, name)
        if before != after:
            found[name] = f"{before} -> {after}"
    return found


def _versions(old: BenchResult, new: BenchResult) -> dict[str, str]:
    before, after = old.environment.versions, new.environment.versions
    return {
        name: f"{before.get(name)} -> {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }


def _refuse_other_work(old: CaseResult, new: CaseResult) -> None:
    different = [
        f"{item.name} {getattr(old.workload, item.name)} -> {getattr(new.workload, item.name)}"
        for item in fields(old.workload)
        if getattr(old.workload, item.name) != getattr(new.workload, item.name)
    ]
    if different:
        raise ConfigError(
            f"the case {old.workload.key} is other work in the second result: "
            f"{'; '.join(different)}. Remedy: measure the same workload"
        )


def _case_changes(old: CaseResult, new: CaseResult, base: str, tolerance: float) -> list[Change]:
    for case, which in ((old, "first"), (new, "second")):
        if case.find(base) is None:
            ran = ", ".join(item.name for item in case.contenders) or "none"
            raise ConfigError(
                f"{base!r}, which speed-ups are of, did not run in case {case.workload.key} of the "
                f"{which} result. Remedy: give as --base one of: {ran}"
            )
        for item in case.contenders:
            if not all(window > 0 for window in item.timing.window_ms):
                raise ConfigError(
                    f"{item.name} in case {case.workload.key} of the {which} result has a window "
                    "of 0 ms, which no measurement has. Remedy: measure again"
                )
    key, changes = old.workload.key, []
    reasons = {item.name: item.reason for item in new.not_run if item.reason != NOT_ASKED}
    for contender in old.contenders:
        if contender.name == base:
            continue
        theirs = new.find(contender.name)
        if theirs is not None:
            changes.append(_change(old, new, contender, theirs, base, tolerance))
            continue
        reason = reasons.get(contender.name)
        verdict = Verdict.ABSENT if reason is None else Verdict.LOST
        side = _side(old, contender, base)
        changes.append(Change(key, contender.name, verdict, old=side, reason=reason or ""))
    for contender in new.contenders:
        if contender.name != base and old.find(contender.name) is None:
            side = _side(new, contender, base)
            changes.append(Change(key, contender.name, Verdict.NEW, new=side))
    return changes


def _change(
    old: CaseResult,
    new: CaseResult,
    mine: ContenderResult,
    theirs: ContenderResult,
    base: str,
    tolerance: float,
) -> Change:
    before, after = _side(old, mine, base), _side(new, theirs, base)
    ratio = after.speedup.median / before.speedup.median
    low, high = ratio_interval(old.ratios(mine.name, base), new.ratios(mine.name, base))
    return Change(
        case=old.workload.key,
        contender=mine.name,
        verdict=judge(ratio, low, high, tolerance),
        old=before,
        new=after,
        ratio=ratio,
        low=low,
        high=high,
        lost_bits=before.bit_exact and not after.bit_exact,
    )


def judge(ratio: float, low: float, high: float, tolerance: float) -> Verdict:
    """Return what a ratio of speed-ups means.

    A change counts if it is larger than the tolerance and its interval leaves 1 out; a large one
    whose interval holds 1 is noise, or a call for more rounds.
    """
    if ratio < 1 - tolerance:
        return Verdict.SLOWER if high < 1 else Verdict.UNCLEAR
    if ratio > 1 / (1 - tolerance):
        return Verdict.FASTER if low > 1 else Verdict.UNCLEAR
    return Verdict.SAME


def ratio_interval(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of median(new) / median(old), by resampling the rounds of each.

    The resampling is seeded: the same files give the same verdict.

    Source: Efron 1979, percentile bootstrap.
    """
    generator = random.Random(0)
    found = [
        statistics.median(generator.choices(new, k=len(new)))
        / statistics.median(generator.choices(old, k=len(old)))
        for _ in range(_NUM_RESAMPLES)
    ]
    return quantile(found, _INTERVAL[0]), quantile(found, _INTERVAL[1])


def _side(case: CaseResult, contender: ContenderResult, base: str) -> Side:
    reference = case.find(base)
    assert reference is not None
    own, theirs = _peak_bytes(contender), _peak_bytes(reference)
    return Side(
        speedup=Spread.of(case.ratios(contender.name, base)),
        step_ms=contender.timing.steps.median,
        memory_ratio=own / theirs if own and theirs else None,
        bit_exact=contender.parity.bit_exact,
    )


def _peak_bytes(contender: ContenderResult) -> int | None:
    memory = contender.memory
    if memory is None:
        return None
    return memory.allocated_bytes if memory.allocated_bytes is not None else memory.process_bytes
