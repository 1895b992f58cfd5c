"""Keeps Ctrl-C and other signals out of a stretch of code that must not end in the middle."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]

# What lies below signal's functions, at a tenth of their cost: the wrappers make enums of numbers.
_FAST: Any = getattr(signal, "_signal", signal)
# All that programs handle; asked in each replay, so the sixty realtime signals are left out.
_NAMES = (
    *("HUP", "INT", "QUIT", "TERM", "ABRT", "BREAK", "USR1", "USR2", "ALRM", "VTALRM", "PROF"),
    *("XCPU", "XFSZ", "CONT", "CHLD", "TSTP", "TTIN", "TTOU", "URG", "IO", "WINCH", "PWR", "PIPE"),
)
_NUMBERS = tuple(int(getattr(signal, f"SIG{n}")) for n in _NAMES if hasattr(signal, f"SIG{n}"))


class DeferredInterrupts:
    """A context in which signals wait; they are delivered when the body is over.

    A replay is short, has no code of the user in it, and writes in place: to end it is quicker
    than to undo it, and leaves everything consistent. Every handler that is written in Python is
    kept waiting, since any may raise: Ctrl-C's, a timeout's (SIGALRM), a scheduler's (SIGTERM,
    SIGUSR1). Signals reach the main thread alone; on others this does nothing.
    """

    __slots__ = ("_caught", "_previous")

    def __init__(self) -> None:
        self._previous: dict[int, _Handler] = {}
        self._caught: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        get_handler = _FAST.getsignal
        try:
            for number in _NUMBERS:
                handler = get_handler(number)
                if callable(handler):
                    self._previous[number] = handler
                    _FAST.signal(number, self._catch)
        except BaseException:  # of a handler whose turn had not come yet
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._restore(dict(self._previous))
        finally:
            if self._caught:
                self._deliver()

    def _restore(self, waiting: dict[int, _Handler]) -> None:
        """Put the handlers back, also if one that is back already raises meanwhile."""
        try:
            while waiting:
                number = next(iter(waiting))
                _FAST.signal(number, waiting[number])
                del waiting[number]
        finally:
            if waiting:
                self._restore(waiting)

    def _deliver(self) -> None:
        """Call the handlers in the order of the signals, also if one of them raises."""
        number = next(iter(self._caught))
        frame = self._caught.pop(number)
        try:
            self._previous[number](number, frame)
        finally:
            if self._caught:
                self._deliver()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.setdefault(number, frame)
