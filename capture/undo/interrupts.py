"""Keeps Ctrl-C and SIGTERM out of a stretch of code that must not end in the middle."""

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]

# What lies below signal's functions, at a tenth of their cost: the wrappers make enums of numbers.
_FAST: Any = getattr(signal, "_signal", signal)
# What ends programs by hand and by schedulers; handlers of others run at once, as in any loop.
_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))


class DeferredInterrupts:
    """A context in which SIGINT and SIGTERM wait; they are delivered when the body is over.

    Each call of a step is one, and ``interruptible`` says where they come through. An exception
    between what a context has done and the ``with`` that would undo it (a mode, a lock, a profile
    hook) would leave that for ever. And a replay is short, has no code of the user in it, and
    writes in place: to end it is quicker than to undo it, and leaves everything consistent.

    Handlers that are written in Python are kept waiting, since they may raise. Signals reach the
    main thread alone; on others this does nothing.

    Attributes:
        is_open: Signals come through.
    """

    __slots__ = ("_caught", "_previous", "_replaced", "_token", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._previous: dict[int, _Handler] = {}
        self._replaced: list[int] = []  # numbers of signals whose handlers are to be put back
        self._caught: dict[int, FrameType | None] = {}
        self._token: Token[DeferredInterrupts | None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        get_handler = _FAST.getsignal
        try:
            for number in _SIGNALS:
                handler = get_handler(number)
                if callable(handler):
                    self._previous[number] = handler
                    self._replaced.append(number)
                    _FAST.signal(number, self._catch)
            self._token = _deferring.set(self)
        except BaseException:  # of a handler whose turn had not come yet
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        """Put the handlers back, also if one that is back already raises meanwhile."""
        try:
            token, self._token = self._token, None
            if token is not None:
                _deferring.reset(token)
            while self._replaced:
                number = self._replaced[-1]
                _FAST.signal(number, self._previous[number])
                self._replaced.pop()
        finally:
            if self._replaced:
                self.__exit__()
            elif self._caught:
                self.deliver()

    def deliver(self) -> None:
        """Call the handlers of signals that wait, in their order, also if one of them raises."""
        if not self._caught:
            return
        number = next(iter(self._caught))
        frame = self._caught.pop(number)
        try:
            self._previous[number](number, frame)
        finally:
            self.deliver()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.is_open:
            self._previous[number](number, frame)
        else:
            self._caught.setdefault(number, frame)


_deferring: ContextVar[DeferredInterrupts | None] = ContextVar("deferring", default=None)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let signals through while the body runs, and first those that have waited.

    For code that may raise anywhere, and is undone then: the user's own, and what torch runs in it.
    """
    deferring = _deferring.get()
    if deferring is None:
        yield
        return
    was_open, deferring.is_open = deferring.is_open, True
    try:
        deferring.deliver()
        yield
    finally:
        deferring.is_open = was_open


def deliver_waiting() -> None:
    """Call the handlers of signals that wait; for where ranks and threads wait for each other."""
    with interruptible():
        pass


def is_of_handler(error: BaseException) -> bool:
    """Tell whether a signal's handler has raised an error, whatever it was that it came into."""
    handlers = filter(callable, map(signal.getsignal, signal.valid_signals()))
    functions = [getattr(each, "func", each) for each in handlers]  # of a functools.partial
    called = [each if hasattr(each, "__code__") else type(each).__call__ for each in functions]
    codes = {getattr(each, "__code__", None) for each in called}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
