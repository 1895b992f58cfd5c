"""Tensors that an iteration leaves in Python for whoever looks at them between two calls.

A replay writes into those that the recorded iteration has left: an activation that a hook puts into
a dict, the last logits as an attribute of a loss object. Another run as Python (an audit, a batch
of another kind) leaves others there, so that they have to be put back before the next replay.
"""

from collections.abc import Iterator
from types import CellType
from typing import Any

from torch import Tensor

from graphfsdp._capture.guards.walk import Walk
from graphfsdp._capture.guards.weakened import is_alike, weakened

_MAX_ITEMS = 10_000
_OF_MODULES = ("_parameters", "_buffers", "_modules")
Kept = tuple[Any, Any, Any]  # dict, list or cell, a key, what is there: a tensor, or holds some


class Held:
    """What a walk has found, as it was; no tensor is held that the iteration may let go."""

    def __init__(self, walk: Walk) -> None:
        self._items = {(id(at), key): weakened(value) for at, key, value in _holding(walk)}

    def left(self, walk: Walk) -> list[Kept]:
        """Return what is there now and was not before; a list may go on growing."""
        return [
            (holder, key, value)
            for holder, key, value in _holding(walk)
            if not is_alike(self._items.get((id(holder), key)), value)
            and ((id(holder), key) in self._items or not isinstance(holder, list))
        ]


def put_back(kept: list[Kept]) -> None:
    for holder, key, value in kept:
        if isinstance(holder, CellType):
            holder.cell_contents = value
        elif isinstance(holder, dict) or key < len(holder):
            holder[key] = value


def _holding(walk: Walk) -> Iterator[Kept]:
    """Yield what holds tensors among all that code comes to, each once."""
    found: list[Any] = [vars(module) for _, module in walk.modules.values()]
    found += walk.tables.values()
    found += (each for place in walk.places.values() for each in (place.holder, place.live))
    for holder in {id(each): each for each in found}.values():
        if isinstance(holder, CellType):
            items: Any = [("", holder.cell_contents)]
        elif isinstance(holder, (dict, list)) and len(holder) <= _MAX_ITEMS:
            items = dict.items(holder) if isinstance(holder, dict) else enumerate(holder)
        else:
            continue
        for key, value in items:
            # By its type: isinstance asks an object for its class, of which
            # torch.distributed.reduce_op warns that it is deprecated.
            may_hold = issubclass(type(value), (Tensor, list, tuple, dict))
            if may_hold and key not in _OF_MODULES and weakened(value) is not value:
                yield holder, key, value
