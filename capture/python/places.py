"""Named places of Python, as they were at one time, and what has moved between two times."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphfsdp._capture.python.held import position_of, put, put_array, put_length, state_of
from graphfsdp._capture.trace.reach import MISSING, WeakTensor, without_tensors


@dataclass(slots=True)
class Place:
    """Where one value is held.

    Attributes:
        value: A number, a string; of something else what tells it from another.
        kind: "value", "length" (of a container), "keys", "array", "advance" (of an iterator),
            "generator" (of random numbers), "clock", or "type" (of anything else).
        holder: Who holds it, and ``key``, under which; None of what cannot be set.
    """

    value: Any
    kind: str = "value"
    holder: Any = None
    key: Any = None

    def is_same(self, other: "Place") -> bool:
        mine, its = self.value, other.value
        if mine is its:
            return True
        if type(mine) is not type(its) or self.kind != other.kind:
            return False
        if isinstance(mine, np.ndarray):
            return mine.dtype == its.dtype and np.array_equal(mine, its, equal_nan=_is_float(mine))
        if isinstance(mine, float):
            return repr(mine) == repr(its)  # NaN is NaN, and 0.0 is not -0.0
        return bool(mine == its)

    def again(self) -> "Place":
        """Return what an iterator or a generator is now."""
        value = state_of(self.holder) if self.kind == "generator" else self.holder
        return Place(position_of(value, 0) if self.kind == "advance" else value, self.kind)

    def set(self, value: Any) -> None:
        if self.kind == "length":
            put_length(self.holder, value)
        elif self.kind == "array":
            put_array(self.holder, value)
        else:
            put(self.holder, self.key, value)


@dataclass(slots=True)
class Move:
    """A place that an iteration has moved.

    Attributes:
        old: Its value before, in words ``MISSING`` where there was none.
        new: Its value behind.
    """

    name: str
    kind: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.kind == "advance":
            return f"{self.name} was advanced"
        if self.kind == "generator":
            return f"{self.name} has drawn"
        if self.kind == "length" and isinstance(self.old, int) and isinstance(self.new, int):
            more = self.new - self.old
            entries = f"{abs(more)} {'entry' if abs(more) == 1 else 'entries'}"
            name = self.name.removeprefix("len(").removesuffix(")")
            return f"{name} {'grew' if more > 0 else 'shrank'} by {entries}"
        return f"{self.name}: {_shown(self.old)} -> {_shown(self.new)}"


class Snapshot:
    """All places in reach, and what puts them back.

    Attributes:
        places: By name.
        numbers: Constants of the users' code.
        clocks: Where functions are held that tell the time.
    """

    def __init__(self, *, weakly: bool = False) -> None:
        """``weakly``: hold no tensor that containers hold; what is gone is not put back."""
        self._weakly = weakly
        self.places: dict[str, Place] = {}
        self.numbers: set[float] = set()
        self.clocks: list[Place] = []
        self._held: list[tuple[Callable[[Any, Any], None], Any, Any]] = []

    def hold(self, put_back: Callable[[Any, Any], None], live: Any, saved: Any) -> None:
        """Remember what something that can change held: its items, not one of its own objects."""
        kept = _each(without_tensors, saved) if self._weakly else saved
        self._held.append((put_back, live, kept))

    def restore(self) -> None:
        """Put everything back to what it was, in the objects that it was in."""
        for put_back, live, saved in reversed(self._held):
            # Of users' own classes, of read-only arrays, of what is gone.
            with contextlib.suppress(Exception):
                put_back(live, _each(_strong, saved) if self._weakly else saved)

    def moves_to(self, later: "Snapshot") -> list[Move]:
        """Return what is not as it was; of a container that grew, not its new entries."""
        found, others = [], []
        for name, place in self.places.items():
            now = later.places.get(name)
            if now is None:
                others.append(Move(name, place.kind, place.value, MISSING))
            elif not place.is_same(now):
                found.append(Move(name, place.kind, place.value, now.value))
        for name, place in later.places.items():
            if name not in self.places and place.kind not in ("length", "keys"):
                others.append(Move(name, place.kind, MISSING, place.value))
        found = found or others
        lengths = {move.name for move in found if move.kind == "length"}
        return [move for move in found if move.kind != "keys" or move.name not in lengths]


def _each(change: Callable[[Any], Any], saved: Any) -> Any:
    if type(saved) is dict:
        return {key: change(value) for key, value in saved.items()}
    return [change(item) for item in saved] if type(saved) is list else change(saved)


def _strong(value: Any) -> Any:
    if not isinstance(value, WeakTensor):
        return value
    found = value()
    if found is None:
        raise LookupError("a tensor that is gone")
    return found


def _is_float(values: np.ndarray[Any, Any]) -> bool:
    return values.dtype.kind in "fc"


def _shown(value: Any) -> str:
    if value is MISSING:
        return "missing"
    text = repr(value) if not isinstance(value, np.ndarray) else str(value.tolist())
    return text if len(text) <= 60 else text[:57] + "..."
