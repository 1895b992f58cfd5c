"""``graphfsdp bench compare A B``: a gate for CI over two results.

Times of two runs do not tell a slower program from a slower hour. What does is how many times as
fast as eager each contender was, since the two took turns: that ratio is formed round by round
inside each file, and the files' ratios are compared.
"""

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.console import Console

from graphfsdp.bench.records import (
    REFERENCE,
    BenchResult,
    CaseResult,
    Spread,
    read_result,
)
from graphfsdp.bench.tables import Table, wide_console
from graphfsdp.command_line import Parser, print_line, require
from graphfsdp.errors import ConfigError

DEFAULT_TOLERANCE = 0.05
EXIT_REGRESSION = 1
# What makes two machines two machines. Versions and commits are what one wants to compare.
MACHINE_FIELDS = (
    *("device", "gpu", "gpu_memory_bytes", "compute_capability", "system", "cpu", "num_cpus"),
    *("num_threads", "num_ranks", "backend"),
)
_NUM_RESAMPLES = 2000


class Verdict(StrEnum):
    SAME = "same"
    FASTER = "faster"
    UNCLEAR = "unclear"
    SLOWER = "slower"
    LOST = "no longer runs"
    INEXACT = "no longer bit-exact"


WORSE = (Verdict.SLOWER, Verdict.LOST, Verdict.INEXACT)


@dataclass(frozen=True)
class Change:
    """What has become of a contender in a case; of one that no longer runs only the reason.

    ``ratio`` is the new speed-up over the old one, of the medians; ``low`` and ``high`` are the
    ends of its 95 % interval (bootstrap over rounds).
    """

    case: str
    contender: str
    verdict: Verdict
    old: Spread
    new: Spread | None = None
    ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    reason: str = ""

    def row(self) -> tuple[str, ...]:
        if self.new is None:
            return (self.case, self.contender, str(self.old), "-", "", "", self.verdict.value)
        interval = f"{self.low:.3f} to {self.high:.3f}"
        ends = (f"{self.ratio:.3f}", interval, self.verdict.value)
        return (self.case, self.contender, str(self.old), str(self.new), *ends)


def compare(
    old: BenchResult, new: BenchResult, tolerance: float = DEFAULT_TOLERANCE
) -> tuple[Change, ...]:
    """Refuse (ConfigError) what did not measure the same thing, or not on the same machine.

    ``tolerance`` is the part of a speed-up that may be lost before it counts. Contenders that one
    of the two did not measure are left out.
    """
    require("tolerance", tolerance, 0 <= tolerance < 1, "in [0, 1)")
    ours, theirs = (
        {name: getattr(result.environment, name) for name in MACHINE_FIELDS}
        for result in (old, new)
    )
    if ours != theirs:
        raise ConfigError(
            f"the two results were measured on different machines: {_differences(ours, theirs)}. "
            "Remedy: measure both on one"
        )
    found: list[Change] = []
    for case in old.cases:
        again = new.find(case.workload.key)
        if again is not None:
            found += _changes(case, again, tolerance)
    if not found:
        keys = ("; ".join(case.workload.key for case in result.cases) for result in (old, new))
        raise ConfigError(
            f"no contender beside {REFERENCE!r} ran in the same case of both results, which have "
            f"{' and '.join(key or 'none' for key in keys)}. Remedy: measure the same workloads"
        )
    return tuple(found)


def _differences(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    return "; ".join(f"{key} {old[key]} -> {new[key]}" for key in old if old[key] != new[key])


def _changes(old: CaseResult, new: CaseResult, tolerance: float) -> Iterator[Change]:
    key = old.workload.key
    different = _differences(asdict(old.workload), asdict(new.workload))
    if different:
        raise ConfigError(
            f"the case {key} is other work in the second result: {different}. Remedy: measure the "
            "same workload"
        )
    reasons = {item.name: item.reason for item in new.not_run}
    for own in old.contenders:
        before, again = old.ratios(own.name), new.find(own.name)
        if own.name == REFERENCE or not before:
            continue
        spread, after = Spread.of(before), new.ratios(own.name)
        if again is not None and after:
            ratio = statistics.median(after) / spread.median
            low, high = ratio_interval(before, after)
            verdict = judge(ratio, low, high, tolerance)
            if own.parity.bit_exact and not again.parity.bit_exact:
                verdict = Verdict.INEXACT
            yield Change(key, own.name, verdict, spread, Spread.of(after), ratio, low, high)
        elif own.name in reasons:
            yield Change(key, own.name, Verdict.LOST, spread, reason=reasons[own.name])


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


def run_compare(arguments: Sequence[str], console: Console) -> int:
    """Return 1 if something has become slower, no longer runs or is no longer bit-exact."""
    given = _make_parser().parse_args(arguments)
    old, new = read_result(given.old), read_result(given.new)
    changes = compare(old, new, given.tolerance)
    title = f"times as fast as {REFERENCE}, median (smallest to largest) of rounds"
    heading = ("case", "contender", "A", "B", "B over A", "95 % interval", "verdict")
    styles = ["bold red" if change.verdict in WORSE else "" for change in changes]
    console = wide_console(console)
    console.print(Table(title, heading, [change.row() for change in changes], 2).rich(styles))
    for change in changes:
        if change.reason:
            print_line(console, f"{change.contender} no longer runs: {change.reason}")
    for case in old.cases:
        if new.find(case.workload.key) is None:
            print_line(console, f"{case.workload.key}: not in B, so not compared")
    if any(change.verdict is Verdict.UNCLEAR for change in changes):
        print_line(console, "unclear: the rounds scatter more than what changed; measure longer")
    num_worse = sum(change.verdict in WORSE for change in changes)
    print_line(
        console,
        f"{num_worse} of {len(changes)} contenders are worse (tolerance {given.tolerance:.0%})",
    )
    return EXIT_REGRESSION if num_worse else 0


def _make_parser() -> Parser:
    parser = Parser(
        prog="graphfsdp bench compare",
        description="Compare two results of graphfsdp bench by how many times as fast as eager "
        "each contender was: a ratio inside each result, which the hour of the day and the clock "
        "of the machine leave alone. Ends with 1 if something has become slower by more than the "
        "tolerance and the ratio's 95 % interval leaves 1 out, if a contender no longer runs, or "
        "if its losses are no longer bit-exact.",
        allow_abbrev=False,
    )
    parser.add_argument("old", metavar="A", help="result.json or result directory: what was")
    parser.add_argument("new", metavar="B", help="the same: what is")
    parser.add_argument(
        "--tolerance", type=float, default=DEFAULT_TOLERANCE, metavar="X",
        help="part of a speed-up that may be lost (default: %(default)s)",
    )  # fmt: skip
    return parser
