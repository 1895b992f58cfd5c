"""Tensors that an iteration leaves in Python for whoever looks at them between two calls.

A replay writes into those that the recorded iteration has left: an activation that a hook puts into
a dict, the last logits as an attribute of a loss object. Another run as Python (an audit, a batch
of another kind) leaves others there, so that they have to be put back before the next replay.
"""

from collections.abc import Iterator
from contextlib import suppress
from types import CellType
from typing import Any

from torch import Tensor

from graphfsdp._capture.guards.places import Place
from graphfsdp._capture.guards.walk import Walk
from graphfsdp._capture.guards.weakened import Weakened, WeakTensor, is_alike, weakened

_MAX_ITEMS = 10_000
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_IN_CELL = "cell_contents"
Kept = tuple[Any, Any, Any]  # dict, list or cell, a key, what is there: a tensor, or holds some


class Held:
    """What a walk has found, as it was; no tensor is held that the iteration may let go."""

    def __init__(self, walk: Walk) -> None:
        self._items: dict[tuple[int, Any], Any] = {}
        self._lengths: dict[int, int] = {}
        for holder in _holders(walk):
            self._lengths[id(holder)] = _length(holder)
            for key, value in _items(holder):
                loose = weakened(value)
                if isinstance(loose, (WeakTensor, Weakened)):
                    self._items[id(holder), key] = loose

    def left(self, walk: Walk) -> list[Kept]:
        """Return what is there now and was not before."""
        found: list[Kept] = []
        for holder in _holders(walk):
            if isinstance(holder, list) and self._lengths.get(id(holder)) != _length(holder):
                continue  # it goes on growing
            for key, value in _items(holder):
                if not isinstance(weakened(value), (WeakTensor, Weakened)):
                    continue
                before = self._items.get((id(holder), key))
                if before is None or not is_alike(before, value):
                    found.append((holder, key, value))
        return found


def put_back(kept: list[Kept]) -> None:
    for holder, key, value in kept:
        if isinstance(holder, CellType):
            holder.cell_contents = value
        elif isinstance(holder, dict) or key < len(holder):
            holder[key] = value


def _holders(walk: Walk) -> Iterator[Any]:
    """Yield the dicts and lists that hold what code comes to, each once."""
    tables = (vars(module) for _, module in walk.modules.values())
    found: list[Any] = [*tables, *walk.tables.values()]
    found += (each for place in walk.places.values() for each in _of_place(place))
    yield from {id(each): each for each in found if _length(each) <= _MAX_ITEMS}.values()


def _of_place(place: Place) -> Iterator[Any]:
    for each in (place.holder, place.live):
        if isinstance(each, (dict, list, CellType)):
            yield each


def _length(holder: Any) -> int:
    return 1 if isinstance(holder, CellType) else len(holder)


def _items(holder: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(holder, list):
        yield from enumerate(holder)
        return
    if isinstance(holder, CellType):
        with suppress(ValueError):  # empty
            yield _IN_CELL, holder.cell_contents
        return
    for key, value in dict.items(holder):
        # By its type: isinstance asks an object for its class, of which torch.distributed.reduce_op
        # warns that it is deprecated.
        if issubclass(type(value), (Tensor, list, tuple, dict)) and key not in _OF_MODULES:
            yield key, value
