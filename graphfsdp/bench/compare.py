"""``graphfsdp bench compare A B``: two results as a table, as JSON, and as a gate for CI.

Times of two runs do not tell a slower program from a slower hour. What does is how many times as
fast as eager each contender was, since the two took turns: that ratio is formed round by round
inside each file, and the files' ratios are compared.
"""

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from rich.console import Console

from graphfsdp.bench.records import (
    NOT_ASKED,
    REFERENCE,
    BenchResult,
    CaseResult,
    Spread,
    read_result,
    to_json,
)
from graphfsdp.bench.tables import Table, wide_console
from graphfsdp.command_line import Parser, add_flags, print_line, require
from graphfsdp.errors import ConfigError

KIND = "graphfsdp_bench_comparison"
DEFAULT_TOLERANCE = 0.05
EXIT_REGRESSION = 1
# What makes two machines two machines. Versions and commits are what one wants to compare.
MACHINE_FIELDS = (
    *("device", "gpu", "gpu_memory_bytes", "compute_capability", "system", "cpu", "num_cpus"),
    *("num_threads", "num_ranks", "backend"),
)
CHANGED_FIELDS = ("commit", "python", "torch", "driver", "cuda", "clock_mhz", "power_limit_w")
_NUM_RESAMPLES = 2000


class Verdict(StrEnum):
    SAME = "same"
    FASTER = "faster"
    SLOWER = "slower"
    UNCLEAR = "unclear"
    LOST = "no longer runs"
    ABSENT = "not measured"
    NEW = "new"


@dataclass(frozen=True)
class Side:
    """A contender in one file; ratios are over the base's, None where unknown."""

    speedup: Spread
    step_ms: float
    memory_ratio: float | None
    bit_exact: bool


@dataclass(frozen=True)
class Change:
    """What has become of a contender in a case; None is what did not run in one of the files.

    ``ratio`` is the new speed-up over the old one, of the medians; ``low`` is the lower end of its
    95 % interval (bootstrap over rounds).
    """

    case: str
    contender: str
    verdict: Verdict
    old: Side | None = None
    new: Side | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    lost_bits: bool = False
    reason: str = ""

    @property
    def is_regression(self) -> bool:
        return self.verdict in (Verdict.SLOWER, Verdict.LOST) or self.lost_bits


@dataclass(frozen=True)
class Comparison:
    """Two results; ``environment`` holds what differs, as "old -> new"."""

    base: str
    tolerance: float
    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    environment: Mapping[str, str]
    same_machine: bool
    kind: str = KIND

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.is_regression)


def compare(
    old: BenchResult,
    new: BenchResult,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    base: str = REFERENCE,
    other_machine: bool = False,
) -> Comparison:
    """Refuse (ConfigError) what did not measure the same thing, or not on the same machine.

    ``tolerance`` is the part of a speed-up that may be lost before it counts.
    """
    require("tolerance", tolerance, 0 <= tolerance < 1, "in [0, 1)")
    machines = _differences(_facts(old, MACHINE_FIELDS), _facts(new, MACHINE_FIELDS))
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
    changes = [
        change for mine, theirs in common for change in _case_changes(mine, theirs, base, tolerance)
    ]
    if not any(change.ratio is not None for change in changes):
        raise ConfigError(
            f"no contender beside {base!r} ran in both results. Remedy: give another --base, or "
            "measure more contenders"
        )
    keys = [{case.workload.key: None for case in result.cases} for result in (old, new)]
    return Comparison(
        base=base,
        tolerance=tolerance,
        changes=tuple(changes),
        only_old=tuple(key for key in keys[0] if key not in keys[1]),
        only_new=tuple(key for key in keys[1] if key not in keys[0]),
        environment=machines
        | _differences(_facts(old, CHANGED_FIELDS), _facts(new, CHANGED_FIELDS))
        | _differences(old.environment.versions, new.environment.versions),
        same_machine=not machines,
    )


def _keys(cases: Sequence[CaseResult]) -> str:
    return ", ".join(case.workload.key for case in cases) or "none"


def _differences(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, str]:
    names = dict.fromkeys((*old, *new))
    return {
        name: f"{old.get(name)} -> {new.get(name)}"
        for name in names
        if old.get(name) != new.get(name)
    }


def _facts(result: BenchResult, names: Sequence[str]) -> dict[str, object]:
    return {name: getattr(result.environment, name) for name in names}


def _case_changes(old: CaseResult, new: CaseResult, base: str, tolerance: float) -> list[Change]:
    key, changes = old.workload.key, []
    different = _differences(asdict(old.workload), asdict(new.workload))
    if different:
        told = "; ".join(f"{name} {change}" for name, change in different.items())
        raise ConfigError(
            f"the case {key} is other work in the second result: {told}. Remedy: measure the same "
            "workload"
        )
    for case, which in ((old, "first"), (new, "second")):
        if case.find(base) is None:
            ran = ", ".join(item.name for item in case.contenders) or "none"
            raise ConfigError(
                f"{base!r}, which speed-ups are of, did not run in case {key} of the {which} "
                f"result. Remedy: give as --base one of: {ran}"
            )
        for item in case.contenders:
            if not all(window > 0 for window in item.timing.window_ms):
                raise ConfigError(
                    f"{item.name} in case {key} of the {which} result has a window of 0 ms, which "
                    "no measurement has. Remedy: measure again"
                )
    reasons = {item.name: item.reason for item in new.not_run if item.reason != NOT_ASKED}
    for name in dict.fromkeys(item.name for item in (*old.contenders, *new.contenders)):
        if name == base:
            continue
        before, after = _side(old, name, base), _side(new, name, base)
        if before is None:
            changes.append(Change(key, name, Verdict.NEW, new=after))
        elif after is None:
            verdict = Verdict.LOST if name in reasons else Verdict.ABSENT
            changes.append(Change(key, name, verdict, before, reason=reasons.get(name, "")))
        else:
            ratio = after.speedup.median / before.speedup.median
            low, high = ratio_interval(old.ratios(name, base), new.ratios(name, base))
            verdict = judge(ratio, low, high, tolerance)
            lost_bits = before.bit_exact and not after.bit_exact
            changes.append(Change(key, name, verdict, before, after, ratio, low, high, lost_bits))
    return changes


def judge(ratio: float, low: float, high: float, tolerance: float) -> Verdict:
    """A change counts if it is larger than the tolerance and its interval leaves 1 out.

    A large one whose interval holds 1 is noise, or a call for more rounds.
    """
    if ratio < 1 - tolerance:
        return Verdict.SLOWER if high < 1 else Verdict.UNCLEAR
    if ratio > 1 / (1 - tolerance):
        return Verdict.FASTER if low > 1 else Verdict.UNCLEAR
    return Verdict.SAME


def ratio_interval(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """95 % interval of median(new) / median(old), by resampling the rounds of each, seeded.

    Source: Efron 1979, percentile bootstrap.
    """
    generator = random.Random(0)
    found = [
        statistics.median(generator.choices(new, k=len(new)))
        / statistics.median(generator.choices(old, k=len(old)))
        for _ in range(_NUM_RESAMPLES)
    ]
    ends = statistics.quantiles(found, n=40, method="inclusive")
    return ends[0], ends[-1]


def _side(case: CaseResult, name: str, base: str) -> Side | None:
    own, reference = case.find(name), case.find(base)
    if own is None or reference is None:
        return None
    peaks = [item.memory.peak_bytes if item.memory else None for item in (own, reference)]
    return Side(
        speedup=Spread.of(case.ratios(name, base)),
        step_ms=own.timing.steps.median,
        memory_ratio=peaks[0] / peaks[1] if peaks[0] and peaks[1] else None,
        bit_exact=own.parity.bit_exact,
    )


@dataclass(frozen=True)
class _Options:
    """Each field is a flag (``add_flags``)."""

    tolerance: Annotated[float, "part of a speed-up that may be lost"] = DEFAULT_TOLERANCE
    base: Annotated[str, "contender that speed-ups are of", "NAME"] = REFERENCE
    other_machine: Annotated[bool, "compare ratios of different machines, too", "store_true"] = (
        False
    )
    json: Annotated[str | None, "write everything there as JSON", "FILE"] = None


def run_compare(arguments: Sequence[str], console: Console) -> int:
    """Return 1 if something has become slower, no longer runs or is no longer bit-exact."""
    given = vars(_make_parser().parse_args(arguments))
    old, new = (read_result(given.pop(name)) for name in ("old", "new"))
    json = given.pop("json", None)
    found = compare(old, new, **given)
    if json is not None:
        try:
            Path(json).write_text(to_json(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {json} cannot be written: {error}") from None
    _print(found, wide_console(console))
    return EXIT_REGRESSION if found.regressions else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="graphfsdp bench compare",
        description="Compare two results of graphfsdp bench by how many times as fast as eager "
        "each contender was: a ratio inside each result, which the hour of the day and the clock "
        "of the machine leave alone. Ends with 1 if something has become slower by more than the "
        "tolerance and the ratio's 95 % interval leaves 1 out, if a contender no longer runs, or "
        "if its losses are no longer bit-exact.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("old", metavar="A", help="result.json or result directory: what was")
    parser.add_argument("new", metavar="B", help="the same: what is")
    add_flags(parser, _Options, {})
    return parser


def _print(found: Comparison, console: Console) -> None:
    title = f"times as fast as {found.base}, median (smallest to largest) of rounds"
    heading = ["case", "contender", "A", "B", "B over A", "95 % interval", "memory A, B", "verdict"]
    if found.same_machine:
        heading.insert(-1, "ms A, B")
    table = Table(title, tuple(heading), tuple(_row(each, found) for each in found.changes), 2)
    console.print(table.rich([_style(change) for change in found.changes]))
    num_unclear = sum(change.verdict is Verdict.UNCLEAR for change in found.changes)
    lines = [f"{name}: {what}" for name, what in found.environment.items()]
    for keys, which in ((found.only_old, "A"), (found.only_new, "B")):
        if keys:
            lines.append(f"only in {which}: {', '.join(keys)}")
    for change in found.changes:
        if change.reason:
            lines.append(f"{change.contender} no longer runs: {change.reason}")
    if num_unclear:
        lines.append(
            f"{num_unclear} unclear: the rounds scatter more than what has changed; measure "
            "longer, or on a quiet machine"
        )
    if found.regressions:
        lines.append(f"{len(found.regressions)} of {len(found.changes)} contenders are worse")
    else:
        clearly = "clearly " if num_unclear else ""
        lines.append(f"nothing is {clearly}worse (tolerance {found.tolerance:.0%})")
    for line in lines:
        print_line(console, line)


def _row(change: Change, found: Comparison) -> tuple[str, ...]:
    sides = (change.old, change.new)
    speedups = [f"{side.speedup}" if side else "-" for side in sides]
    memory = [
        "-" if side is None or side.memory_ratio is None else f"{side.memory_ratio:.2f}"
        for side in sides
    ]
    row = [change.case, change.contender, *speedups]
    row.append("" if change.ratio is None else f"{change.ratio:.3f}")
    row.append("" if change.low is None else f"{change.low:.3f} to {change.high:.3f}")
    row.append(", ".join(memory))
    if found.same_machine:
        row.append(", ".join(f"{side.step_ms:.4g}" if side else "-" for side in sides))
    row.append(change.verdict.value + (", no longer bit-exact" if change.lost_bits else ""))
    return tuple(row)


def _style(change: Change) -> str:
    if change.is_regression:
        return "bold red"
    return {Verdict.FASTER: "green", Verdict.UNCLEAR: "yellow"}.get(change.verdict, "")
