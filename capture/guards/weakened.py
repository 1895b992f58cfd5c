"""Values that are remembered without the tensors in them, and compared with what is there later."""

import weakref
from collections import deque
from typing import Any

from torch import Tensor

from graphfsdp._capture.guards.places import MISSING, same

_CONTAINERS = (list, tuple, dict, deque)
_MAX_DEPTH = 6
_MAX_ITEMS = 10_000


class WeakTensor(weakref.ref[Tensor]):
    """None of the users' own weak references."""


class Weakened:
    """A container with tensors in it, as it was: whoever holds these hides that they are let go of.

    Attributes:
        kind: Its class.
        keys: Of its items: those of a dict, else numbers.
        items: Weak references to tensors, and other items as they are.
    """

    def __init__(self, value: Any, depth: int) -> None:
        self.kind = type(value)
        pairs = list(dict.items(value) if isinstance(value, dict) else enumerate(value))
        self.keys = [key for key, _ in pairs]
        self.items = [weakened(item, depth + 1) for _, item in pairs]


def weakened(value: Any, depth: int = 0) -> Any:
    """Return a value without its tensors; one that has none is itself."""
    if isinstance(value, Tensor):
        return WeakTensor(value)
    return Weakened(value, depth) if _has_tensors(value, depth) else value


def _has_tensors(value: Any, depth: int) -> bool:
    if not isinstance(value, _CONTAINERS) or depth > _MAX_DEPTH or len(value) > _MAX_ITEMS:
        return False
    items = dict.values(value) if isinstance(value, dict) else value
    return any(isinstance(item, Tensor) or _has_tensors(item, depth + 1) for item in items)


def restored(value: Any) -> Any:
    """Return what ``weakened`` was given; LookupError where a tensor is gone."""
    if isinstance(value, WeakTensor):
        found = value()
        if found is None:
            raise LookupError("a tensor that is gone")
        return found
    if not isinstance(value, Weakened):
        return value
    items = map(restored, value.items)
    return dict(zip(value.keys, items, strict=True)) if value.kind is dict else value.kind(items)


def is_alike(old: Any, new: Any, *, but_for_tensors: bool = False) -> bool:
    """Compare what was remembered with what is there.

    ``but_for_tensors``: whatever tensors there are where there were tensors. Which memory they have
    is the business of whoever undoes an iteration.
    """
    if isinstance(old, WeakTensor):
        if but_for_tensors:
            return isinstance(new, Tensor) or new is None
        found = old()
        return found is not None and same(found, new)
    if not isinstance(old, Weakened):
        return same(old, new)
    if type(new) is not old.kind or len(new) != len(old.items):
        return False
    now = new if isinstance(new, dict) else dict(enumerate(new))
    return all(
        is_alike(item, dict.get(now, key, MISSING), but_for_tensors=but_for_tensors)
        for key, item in zip(old.keys, old.items, strict=True)
    )
