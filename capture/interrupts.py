"""Keeps Ctrl-C out of a stretch of code that must not end in the middle."""

import signal
import threading
from types import FrameType
from typing import Any

# What lies below signal's functions, at a tenth of their cost: the wrappers make enums of numbers.
_set_handler: Any = getattr(signal.signal, "__wrapped__", signal.signal)
_get_handler: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_SIGINT = int(signal.SIGINT)


class DeferredInterrupts:
    """A context in which Ctrl-C waits; it is delivered when the body is over.

    A replay is short, has no code of the user in it, and writes in place: to end it is quicker
    than to undo it, and leaves everything consistent. Signals reach the main thread alone; on
    others, and where SIGINT is not handled in Python, this does nothing.
    """

    __slots__ = ("_caught", "_previous")

    def __init__(self) -> None:
        self._previous: Any = None
        self._caught: FrameType | bool | None = False

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        previous = _get_handler(_SIGINT)
        if callable(previous):
            self._previous = _set_handler(_SIGINT, self._catch)

    def __exit__(self, *error: object) -> None:
        previous = self._previous
        if previous is None:
            return
        self._previous = None
        _set_handler(_SIGINT, previous)
        caught, self._caught = self._caught, False
        if caught is not False:
            previous(_SIGINT, caught)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught = frame


__all__ = ["DeferredInterrupts"]
