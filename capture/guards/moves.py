"""Python before and behind an iteration: what it has moved, what stood still, what it has left."""

import contextlib
import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CellType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor

from graphfsdp._capture.guards.places import MISSING, Place, asks_of, change_of, same, state_of
from graphfsdp._capture.guards.walk import Walk
from graphfsdp.errors import Change

_CONTAINERS = (list, tuple, dict, deque)
_MAX_DEPTH = 6
_MAX_ITEMS = 10_000
_OF_MODULES = ("_parameters", "_buffers", "_modules")
Kept = tuple[Any, Any, Any]  # dict, list or cell, a key, what is there: a tensor, or holds some


@dataclass(frozen=True)
class Move:
    """A value that an iteration has moved.

    Attributes:
        title: What it is, for messages.
        words: From what to what it has moved.
        name: By which code comes to it; see ``Uses.deciding``, also for all that follow.
        is_drawn: It is a generator or an iterator, which gives another value each time.
    """

    title: str
    words: str
    name: str
    owner: type | None = None
    is_drawn: bool = False

    def __str__(self) -> str:
        return f"{self.title}: {self.words}" if self.words else self.title


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


class Before:
    """Python as it was before an iteration; no tensor is held that the iteration may let go."""

    def __init__(self, walk: Walk) -> None:
        self._places = {
            title: replace(place, known=weakened(place.known))
            for title, place in walk.places.items()
        }
        self._holding = {(id(at), key): weakened(value) for at, key, value in _holding(walk)}

    def stands(self, title: str, place: Place) -> bool:
        """Tell whether a place holds what it held, or was not met before."""
        old = self._places.get(title)
        return old is None or is_alike(old.known, place.known)

    def moves_to(self, walk: Walk, *, but_for_tensors: bool = True) -> list[Move]:
        """Return what has moved; tensors are the business of whoever undoes an iteration."""
        found = []
        for title, old in self._places.items():
            # A generator may be found elsewhere, or not at all, behind it.
            is_drawn = old.what[0] is state_of
            place = replace(old, known=old.look()) if is_drawn else walk.places.get(title)
            if place is None or _are_of_others(old, place):
                continue
            if not is_alike(old.known, place.known, but_for_tensors=but_for_tensors):
                found.append(move_of(old, place))
        return list(dict.fromkeys(found))

    def left(self, walk: Walk) -> list[Kept]:
        """Return what holds tensors now and did not before; a list may go on growing.

        A replay writes into the tensors that the recorded iteration has left in Python for whoever
        looks at them between two calls: an activation that a hook puts into a dict, the last logits
        as an attribute of a loss object. Another run as Python (an audit, a batch of another kind)
        leaves others there, so that they have to be put back before the next replay.
        """
        return [
            (holder, key, value)
            for holder, key, value in _holding(walk)
            if not is_alike(self._holding.get((id(holder), key)), value)
            and ((id(holder), key) in self._holding or not isinstance(holder, list))
        ]

    def put_back(self, walk: Walk) -> None:
        """Put back what has moved, into the objects that it was in."""
        for title, place in self._places.items():
            now = walk.places.get(title)
            if now is None or not is_alike(place.known, now.known):
                with contextlib.suppress(Exception):  # of users' own classes, of what is gone
                    _put_back(place)


def move_of(old: Place, new: Place) -> Move:
    before = old.known
    if old.what[0] is state_of:
        return Move(old.title, "", old.name, is_drawn=True)
    with contextlib.suppress(LookupError):
        before = restored(before)
    change = change_of(old.title, before, new.known)
    words = f"{change.old} -> {change.new}"
    owner = None if new.owner is None else type(new.owner)
    return Move(change.name, words, new.name, owner)


def _put_back(place: Place) -> None:
    key, live = place.key, place.live
    holder = place.holder if place.of_class is None else place.of_class
    old: Any = restored(place.known)
    if isinstance(live, list):
        live[:] = old
    elif isinstance(live, dict):
        kind = OrderedDict if isinstance(live, OrderedDict) else dict  # which keeps an order beside
        kind.clear(live)
        kind.update(live, old)
    elif isinstance(live, set):
        live.clear()
        live.update(old)
    elif isinstance(live, deque):
        live.clear()
        live.extend(old)
    elif isinstance(live, np.ndarray):
        content, shape, dtype = old
        live[...] = np.frombuffer(content, dtype).reshape(shape)
    elif isinstance(holder, dict):
        if old is MISSING:
            dict.pop(holder, key, None)
        else:
            dict.__setitem__(holder, key, old)
    elif old is MISSING:
        delattr(holder, key)
    elif live is None:
        setattr(holder, key, old)


def _are_of_others(old: Place, new: Place) -> bool:
    """Tell whether two places belong to two functions that merely are called alike."""
    return isinstance(old.holder, FunctionType) and old.holder is not new.holder


class ReadPlaces:
    """The places that code which ran has read, and the recording has left as they were.

    What the recorded iteration has changed itself, it counts or logs, or has refused; a replay
    leaves it. A configuration may be replaced by an equal one: a change is looked for by another
    walk, whose places are compared by their titles.

    Attributes:
        asks: One question for each way to ask.
    """

    def __init__(
        self,
        take: Callable[[], Walk],
        found: Walk,
        before: Before,
        was_read: Callable[[Tensor], bool],
    ) -> None:
        """Remember what ``found`` behind the recording is as it was before it.

        ``take`` walks anew; ``was_read``: whether the recording has touched a tensor's storage.
        """
        self._take = take
        self._sure = found.sure
        self._places = {
            title: place
            for title, place in found.places.items()
            if (not isinstance(place.known, Tensor) or was_read(place.known))
            and place.what[0] is not state_of  # others may draw
            and before.stands(title, place)
        }
        self.asks = asks_of(self._places.values())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that were found, also in lists, with names for messages."""
        for title, place in self._places.items():
            if isinstance(place.known, Tensor):
                yield title, place.known
            elif isinstance(place.known, (list, deque)):
                for index, item in enumerate(place.known):
                    if isinstance(item, Tensor):
                        yield f"{index} of {title.removeprefix('the items of ')}", item

    def let_go_of_moves(self) -> list[Move]:
        """Drop the places that have moved, and return the moves."""
        now = self._take().places
        found = {
            title: move_of(place, now[title])
            for title, place in self._places.items()
            if title in now and not same(place.known, now[title].known)
        }
        loose = {title: weakened(self._places.pop(title).known) for title in found}
        self.asks = asks_of(self._places.values())
        return [
            move
            for title, move in found.items()
            if not is_alike(loose[title], now[title].known, but_for_tensors=True)
        ]

    def changes(self) -> list[Change]:
        """Walk again, compare each place and name what has changed."""
        now, places = self._take().places, self._places
        for title, place in places.items():
            if isinstance(place.holder, FunctionType):  # there may be several of its name
                now[title] = replace(place, known=place.look())
        found = [
            change_of(title, place.known, now[title].known)
            for title, place in places.items()
            if title in now and not same(place.known, now[title].known)
        ]
        found = found or [
            change_of(title, place.known, MISSING)
            for title, place in places.items()
            if title in self._sure and title not in now and not isinstance(place.known, Tensor)
        ]
        if not found:
            self._places = {title: now[title] for title in places if title in now}
            self.asks = asks_of(self._places.values())
        return found


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
