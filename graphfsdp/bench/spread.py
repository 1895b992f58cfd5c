"""Summaries of measured times: quantiles, and ratios of pairs that ran in the same round."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The middle and the ends of a list of measurements."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise ``values``."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.minimum:.3f} to {self.maximum:.3f})"


@dataclass(frozen=True)
class Distribution:
    """Where the times of single steps lie, in milliseconds.

    Attributes:
        num_steps: How many were timed.
        cv: Coefficient of variation, the standard deviation over the mean.
    """

    num_steps: int
    median: float
    mean: float
    p5: float
    p95: float
    p99: float
    maximum: float
    cv: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution":
        """Summarise ``values``, at least one."""
        mean = statistics.fmean(values)
        return cls(
            num_steps=len(values),
            median=statistics.median(values),
            mean=mean,
            p5=quantile(values, 0.05),
            p95=quantile(values, 0.95),
            p99=quantile(values, 0.99),
            maximum=max(values),
            cv=statistics.pstdev(values, mean) / mean if mean else 0.0,
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share of ``values`` lies, linear between neighbours.

    Source: Hyndman & Fan 1996, definition 7, as numpy.quantile.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def paired_ratios(base: Sequence[float], own: Sequence[float]) -> list[float]:
    """Return how many times as fast as the base another contender was, round by round.

    Args:
        base: Milliseconds per step of the base in each round.
        own: The same of the other one, whose windows ran right beside the base's.
    """
    return [theirs / mine for theirs, mine in zip(base, own, strict=True)]
