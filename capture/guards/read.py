"""Guard of the values that an iteration has read of Python."""

import types
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor, nn

from graphfsdp._capture.guards.asks import FUNCTIONS, MISSING, Ask, Places, change_of, same
from graphfsdp._capture.guards.moves import Before, Move, move_of
from graphfsdp._capture.guards.walk import Walk
from graphfsdp._capture.guards.weakened import is_alike, weakened
from graphfsdp._capture.trace.assignments import Assignments
from graphfsdp.base.changes import Change


class ReadGuard:
    """Notices what changed of what code that ran has read.

    What the recorded iteration has changed itself, it counts or logs, or has refused; a replay
    leaves it. A configuration may be replaced by an equal one: places are compared by their titles.
    """

    def __init__(
        self,
        take: Callable[[], Walk],
        found: Walk,
        before: Before,
        assignments: Assignments,
        was_read: Callable[[Tensor], bool],
    ) -> None:
        """Remember everything that ``found`` has.

        Args:
            take: Walks anew.
            found: What there is behind the recording.
            before: What there was before it.
            assignments: Of modules, by the recording.
            was_read: Tells whether the recording has touched a tensor's storage.
        """
        self._take = take
        self._sure = found.sure
        used = {
            title: place
            for title, place in found.places.items()
            if (not isinstance(place.value, Tensor) or was_read(place.value))
            and before.stands(title, place)
            and not assignments.has(place.holder, place.key)
        }
        self.places = Places(_remedy, used)

    def asks(self) -> Iterator[Ask]:
        """Yield one question for each way to look."""
        return self.places.asks(watched=True)

    def let_go_of_moves(self) -> list[Move]:
        """Drop the places that have moved, and return the moves."""
        now = self._take().places
        found = {
            title: move_of(place, now[title])
            for title, place in self.places.places.items()
            if title in now and not same(place.value, now[title].value)
        }
        loose = {title: weakened(self.places.places[title].value) for title in found}
        for title in found:
            del self.places.places[title]
        return [
            move
            for title, move in found.items()
            if not is_alike(loose[title], now[title].value, but_for_tensors=True)
        ]

    def changes(self) -> list[Change]:
        """Walk again, compare each place and name what has changed."""
        now, places = self._take().places, self.places.places
        for title, place in places.items():
            if isinstance(place.holder, types.FunctionType):  # there may be several of its name
                now[title] = replace(place, value=place.look())
        found = [
            change_of(title, place.value, now[title].value, _remedy)
            for title, place in places.items()
            if title in now and not same(place.value, now[title].value)
        ]
        found = found or [
            change_of(title, place.value, MISSING, _remedy)
            for title, place in places.items()
            if title in self._sure and title not in now and not isinstance(place.value, Tensor)
        ]
        if not found:
            self.places.places = {title: now[title] for title in places if title in now}
        return found


def _remedy(old: object) -> str:
    if isinstance(old, Tensor):
        return "write new values into the old tensor (copy_, fill_), which replays see"
    if isinstance(old, nn.Module):
        return "replace modules before the capture, or load weights in place (load_state_dict)"
    if isinstance(old, (*FUNCTIONS, types.CodeType)):
        return "replace functions before the capture, and leave them so"
    return (
        "pass what changes as a tensor of the batch, or hold it in a tensor, such as a buffer of "
        "the model, and write into that (fill_, copy_), which replays see"
    )
