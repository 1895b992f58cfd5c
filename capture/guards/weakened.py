"""Values that are remembered without the tensors in them, and compared with what is there later."""

import operator
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from graphfsdp._capture.guards.places import same

_CONTAINERS = (list, tuple, dict, deque)
_MAX_DEPTH = 6
_MAX_ITEMS = 10_000


class _WeakTensor(weakref.ref[Tensor]):
    """In the place of a tensor: whoever holds that hides that it is let go of."""

    def __eq__(self, other: object) -> bool:
        found = self()
        return found is not None and same(found, other)

    __hash__ = None  # type: ignore[assignment]


class _AnyTensor:
    """Equal to each of them, and to what is left where one was let go of."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) or other is None

    __hash__ = None  # type: ignore[assignment]


def _with(change: Callable[[Any], Any], value: Any, depth: int = 0) -> Any:
    """Return a container with changed leaves; itself where none is changed."""
    if not isinstance(value, _CONTAINERS) or depth > _MAX_DEPTH or len(value) > _MAX_ITEMS:
        return change(value)
    items = list(dict.values(value) if isinstance(value, dict) else value)
    changed = [_with(change, item, depth + 1) for item in items]
    if all(map(operator.is_, changed, items)):
        return value
    if isinstance(value, dict):
        return dict(zip(dict.keys(value), changed, strict=True))
    return next(kind for kind in _CONTAINERS if isinstance(value, kind))(changed)


def weakened(value: Any) -> Any:
    """Return a value without its tensors; one that has none is itself."""
    return _with(lambda leaf: _WeakTensor(leaf) if isinstance(leaf, Tensor) else leaf, value)


def restored(value: Any) -> Any:
    """Return what ``weakened`` was given; LookupError where a tensor is gone."""
    return _with(_alive, value)


def _alive(leaf: Any) -> Any:
    found = leaf() if isinstance(leaf, _WeakTensor) else leaf
    if found is None and leaf is not None:
        raise LookupError("a tensor that is gone")
    return found


def is_alike(old: Any, new: Any, *, but_for_tensors: bool = False) -> bool:
    """Compare what was remembered with what is there.

    ``but_for_tensors``: whatever tensors there are where there were tensors. Which memory they have
    is the business of whoever undoes an iteration.
    """
    formed = _with(lambda leaf: _AnyTensor() if isinstance(leaf, _WeakTensor) else leaf, old)
    if formed is old:
        return same(old, new)
    try:
        return bool((formed if but_for_tensors else old) == new)
    except Exception:  # of the users' own objects
        return False
