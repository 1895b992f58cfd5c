"""Where a number that moves regularly will be after many more iterations."""

import datetime
import enum
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

_LONGEST_PERIOD = 6
_MOST_ELEMENTS = 16
_EXACT = (datetime.date, datetime.timedelta, Decimal, Fraction)
_NO_NUMBERS = (bool, enum.Enum)  # what follows one of these is none of its kind
_DIGITS = re.compile(r"(\d+)")


def further(values: Sequence[Any], num_more: int) -> Any:
    """Return what follows a series after so many more steps; None if it follows no rule.

    Rules are equal steps, each so many entries, and equal factors; of strings, of the numbers in
    them, and of arrays of their elements.
    """
    last = values[-1]
    if isinstance(last, str) and not isinstance(last, enum.Enum):
        return _further_text(values, num_more)
    for period in range(1, _LONGEST_PERIOD + 1):
        step = _equal_step(values, period)
        if step is not None:
            index = len(values) - period + (num_more - 1) % period
            num_steps = (num_more - 1) // period + 1
            start = values[index]
            if isinstance(step, str):
                return start
            try:
                return _kept_type(start, start + step * num_steps)
            except OverflowError:  # of a date
                return None
    return _further_factor(values, num_more)


def steps_in(values: Sequence[Any]) -> Iterator[tuple[float, float]]:
    """Yield each number in the last value that always moves by as much, with its step."""
    last = values[-1]
    if isinstance(last, np.ndarray):
        if last.size <= _MOST_ELEMENTS and all(np.shape(value) == last.shape for value in values):
            for index in range(last.size):
                yield from steps_in([value.flat[index].item() for value in values])
    elif isinstance(last, str):
        parts = [_DIGITS.split(value) for value in values if isinstance(value, str)]
        if len({len(each) for each in parts}) == 1:
            for index in range(1, len(parts[0]), 2):
                yield from steps_in([int(each[index]) for each in parts])
    elif isinstance(last, (int, float, np.number, Decimal, Fraction)) and not isinstance(
        last, _NO_NUMBERS
    ):
        step = _equal_step(values, 1)
        if step is not None and not isinstance(step, str) and step:
            yield float(last), float(step)


def _equal_step(values: Sequence[Any], period: int) -> Any:
    """Return by what the last entries move in each period; "" where they come again."""
    tail = values[-(2 * period + 2) :]
    if len(tail) < 2 * period + 2 or len({type(value) for value in tail}) > 1:
        return None
    pairs = list(zip(tail, tail[period:], strict=False))
    if isinstance(tail[-1], _EXACT):
        exact = [now - before for before, now in pairs]
        return exact[0] if exact.count(exact[0]) == len(exact) else None
    if isinstance(tail[-1], np.ndarray):
        if len({value.shape for value in tail}) > 1 or tail[-1].dtype.kind not in "iuf":
            return None
    elif not isinstance(tail[-1], (int, float, np.number)) or isinstance(tail[-1], _NO_NUMBERS):
        return "" if all(before == now for before, now in pairs) else None
    steps = [now - before for before, now in pairs]
    scale = float(np.max(np.abs(np.asarray(tail[-1])))) if np.size(tail[-1]) else 0.0
    for step in steps[1:]:
        if not np.all(np.abs(np.asarray(step - steps[0], dtype=float)) <= 1e-9 * max(scale, 1e-6)):
            return None
    return steps[-1]


def _kept_type(like: Any, value: Any) -> Any:
    if isinstance(like, _EXACT):
        return value
    if isinstance(like, np.ndarray):
        return value.astype(like.dtype)
    return type(like)(value)


def _further_factor(values: Sequence[Any], num_more: int) -> Any:
    tail = values[-5:]
    if not all(isinstance(value, float) and value for value in tail):
        return None
    factors = [now / before for before, now in pairwise(tail)]
    if any(abs(factor - factors[0]) > 1e-9 * abs(factors[0]) for factor in factors):
        return None
    try:
        found = tail[-1] * factors[0] ** num_more
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _further_text(values: Sequence[Any], num_more: int) -> Any:
    tail = [_DIGITS.split(value) for value in values[-4:] if isinstance(value, str)]
    if len(tail) < 4 or len({(len(parts), *parts[::2]) for parts in tail}) > 1:
        return None
    parts = list(tail[-1])
    for index in range(1, len(parts), 2):
        number = further([int(each[index]) for each in tail], num_more)
        if number is None:
            return None
        parts[index] = str(number)
    return "".join(parts)
