"""What a comparison of two results of ``graphfsdp bench`` has found, in frozen records."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from graphfsdp.bench.spread import Spread

KIND = "graphfsdp_bench_comparison"


class Verdict(StrEnum):
    """What has become of a contender."""

    SAME = "same"
    FASTER = "faster"
    SLOWER = "slower"
    UNCLEAR = "unclear"
    LOST = "no longer runs"
    ABSENT = "not measured"
    NEW = "new"

    @property
    def is_regression(self) -> bool:
        """Whether a gate closes on it."""
        return self in (Verdict.SLOWER, Verdict.LOST)


@dataclass(frozen=True)
class Side:
    """A contender in one file.

    Attributes:
        speedup: How many times as fast as the base, over the rounds.
        step_ms: Median of all steps.
        memory_ratio: Peak memory over the base's; None where one of them is unknown.
        bit_exact: Its losses are the reference's, bit for bit.
    """

    speedup: Spread
    step_ms: float
    memory_ratio: float | None
    bit_exact: bool


@dataclass(frozen=True)
class Change:
    """What has become of a contender in a case.

    Attributes:
        case: Key of the workload.
        contender: Name.
        verdict: As the tolerance has it.
        old: Of the first file; None if it did not run there.
        new: Of the second.
        ratio: New speed-up over old one, of the medians; None if one of them is missing.
        low: Lower end of the ratio's 95 % interval (bootstrap over rounds).
        high: Upper end.
        lost_bits: Losses were bit-exact in the first file and are not in the second.
        reason: Why it no longer runs; empty otherwise.
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
        """Whether a gate closes on it."""
        return self.verdict.is_regression or self.lost_bits


@dataclass(frozen=True)
class Comparison:
    """Two results beside each other.

    Attributes:
        base: Contender that speed-ups are of.
        tolerance: Part of a speed-up that may be lost before it counts.
        changes: Every contender of every case that both files have.
        only_old: Cases of the first file alone.
        only_new: Cases of the second file alone.
        environment: What differs between the two runs, "old -> new" by name.
        same_machine: Whether times may be compared, too.
    """

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
        """What a gate closes on."""
        return tuple(change for change in self.changes if change.is_regression)
