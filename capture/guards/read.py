"""The values that an iteration has read of Python."""

import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from graphfsdp._capture.guards.draws import state_of
from graphfsdp._capture.guards.moves import Before, Move, move_of
from graphfsdp._capture.guards.places import MISSING, asks_of, change_of, same
from graphfsdp._capture.guards.walk import Walk
from graphfsdp._capture.guards.weakened import is_alike, weakened
from graphfsdp.base.changes import Change


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
        """Remember everything that ``found`` has.

        Args:
            take: Walks anew.
            found: What there is behind the recording.
            before: What there was before it.
            was_read: Tells whether the recording has touched a tensor's storage.
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
            if isinstance(place.holder, types.FunctionType):  # there may be several of its name
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
