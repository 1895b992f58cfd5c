"""What a capture moves in Python, and which clocks it reads."""

import contextlib
from collections.abc import Callable, Iterator

from graphfsdp._capture.python.clocks import ClockReads, ahead
from graphfsdp._capture.python.places import Move, Snapshot


class PythonWatch:
    """Looks at Python before and behind a capture, and holds what was there no longer than that.

    Whoever holds the memory of an iteration hides that the iteration has let go of it.
    """

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take
        self._before: Snapshot | None = take()
        self._read: ClockReads = []
        self._watched = contextlib.ExitStack()

    @contextlib.contextmanager
    def watching(self) -> Iterator["PythonWatch"]:
        """Note which clocks the body reads, as far as to ``let_go``."""
        assert self._before is not None
        with self._watched:
            self._read = self._watched.enter_context(ahead(self._before.clocks, 0.0))
            yield self

    def let_go(self) -> None:
        """Give the users' names their clocks back; guards look at them."""
        self._watched.close()

    def end(self) -> tuple[Snapshot | None, list[Move]]:
        """Return what there was before, and what has moved; clocks move by themselves."""
        before, self._before = self._before, None
        if before is None:
            return None, []
        clocks = [Move(name, "clock", None, None) for name, _ in self._read]
        return before, [*before.moves_to(self._take()), *clocks]
