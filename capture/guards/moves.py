"""Python that an iteration moves: refused where something follows from it, else told of once."""

import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import numpy as np

from graphfsdp._capture.guards.draws import state_of
from graphfsdp._capture.guards.places import MISSING, Place, change_of
from graphfsdp._capture.guards.uses import Uses
from graphfsdp._capture.guards.walk import Walk
from graphfsdp._capture.guards.weakened import is_alike, restored, weakened
from graphfsdp._capture.trace.ran import Ran
from graphfsdp.base.hazards import HazardKind
from graphfsdp.errors import CaptureError, Refuse, raised

_LOG = logging.getLogger("graphfsdp")
_MOST_TOLD = 8
REMEDY = (
    "keep what counts in a buffer on the device and change it in place (add_, torch.where decides "
    "by it), pass it as an argument of the step, or do it outside of the iteration"
)
_DRAWS = (
    "draw on the device (torch.rand), or draw and advance outside of the iteration, and pass what "
    "comes of it as a tensor of the batch"
)


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


class Before:
    """Python as it was before an iteration; no tensor is held that the iteration may let go."""

    def __init__(self, walk: Walk) -> None:
        self._places = {
            title: replace(place, known=weakened(place.known))
            for title, place in walk.places.items()
        }

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


def refuse_deciding(
    moves: Sequence[Move], ran: Ran, found: Walk, refuse: Refuse = raised
) -> Sequence[Move]:
    """Refuse moves from which more follows than other moves and log lines; return the others."""
    if not moves:
        return ()
    others = []
    uses = Uses(ran, found.places)
    for move in sorted(moves, key=lambda move: not move.is_drawn):
        decides, source = uses.deciding(move.name, move.owner)
        if move.is_drawn:
            why = (
                f"the iteration {move}; a replay runs no Python, so it would go on with what "
                f"came while it was recorded. Remedy: {_DRAWS}"
            )
        elif decides:
            why = (
                f"the iteration moves Python, which no replay runs, and reads it for more "
                f"than that: {move}. Remedy: {REMEDY}"
            )
        else:
            others.append(move)
            continue
        refuse(CaptureError(why, source=source, kind=HazardKind.BAKED_NUMBER))
    return others


def tell_of(stands_still: Sequence[str]) -> None:
    """Warn, once, of what no replay will move."""
    if stands_still:
        _LOG.warning(
            "a replay runs no Python, so this stands still from now on: %s. Do it outside of the "
            "iteration if it is to go on",
            "; ".join(stands_still[:_MOST_TOLD]),
        )
