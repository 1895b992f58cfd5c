"""Keeps Ctrl-C and SIGTERM out of a stretch of code that must not end in the middle."""

import signal
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from time import monotonic  # under this name: clocks that an iteration reads are set ahead
from types import FrameType
from typing import Any, TypeVar

from graphfsdp._capture.trace.source import is_our_file, is_torchs_file, is_users_file

_Handler = Callable[[int, FrameType | None], Any]
_R = TypeVar("_R")

# What lies below signal's functions, at a tenth of their cost: the wrappers make enums of numbers.
_FAST: Any = getattr(signal, "_signal", signal)
# What ends programs by hand and by schedulers; handlers of others run at once, as in any loop.
_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))
# Behind the first signal, for another one to mean that somebody waits in vain.
_PATIENCE_S = 1.0


class DeferredInterrupts:
    """A context in which SIGINT and SIGTERM wait; they are delivered when the body is over.

    Each call of a step is one, and ``InterruptibleIteration`` says where they come through. An
    exception between what a context has done and the ``with`` that would undo it (a mode, a lock,
    a profile hook) would leave that for ever. And a replay is short, has no code of the user in
    it, and writes in place: to end it is quicker than to undo it, and leaves everything consistent.

    Handlers that are written in Python are kept waiting, since they may raise. Signals reach the
    main thread alone; on others this does nothing.
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
            for number in _SIGNALS:
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


class InterruptibleIteration(DeferredInterrupts):
    """Where, within ``DeferredInterrupts``, an iteration runs: signals come through to it.

    Note [Where signals come through]: where an exception is nothing new. That is in the user's own
    code, called by ``run_users``, which may raise at any time; and at ``deliver_waiting``, which is
    called where an operator begins, and where ranks and threads wait for each other. Torch's
    Python has contexts of its own, which an exception may leave entered; so it counts as the
    user's only where no operator asks (``asks=False``). All else waits, but not for ever: a signal
    that comes again after a second is delivered wherever the program is.
    """

    __slots__ = ("_asks", "_handlers", "_since", "_token")

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self._asks = asks
        self._handlers: dict[int, _Handler] = {}  # the program's own
        self._since: dict[int, float] = {}
        self._token: Token[InterruptibleIteration | None] | None = None

    def __enter__(self) -> None:
        super().__enter__()
        for number, handler in self._previous.items():
            outer = _owner(handler)
            while outer is not None:
                if number in outer._caught:
                    self._caught[number] = outer._caught.pop(number)
                    self._since[number] = monotonic()
                handler = outer._previous[number]
                outer = _owner(handler)
            self._handlers[number] = handler
        if self._previous:  # else this is another thread
            self._token = _iterating.set(self)

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            _iterating.reset(self._token)
        super().__exit__()

    def deliver(self) -> None:
        while self._caught:
            number = next(iter(self._caught))
            self._handlers[number](number, self._caught.pop(number))

    def _catch(self, number: int, frame: FrameType | None) -> None:
        now = monotonic()
        waits_in_vain = number in self._caught and now - self._since[number] > _PATIENCE_S
        if waits_in_vain or self._comes_through(frame):
            self._caught.pop(number, None)
            self._handlers[number](number, frame)
        elif number not in self._caught:
            self._caught[number], self._since[number] = frame, now

    def _comes_through(self, frame: FrameType | None) -> bool:
        if frame is None:
            return False
        file = frame.f_code.co_filename
        if not (is_users_file(file) or (not self._asks and is_torchs_file(file))):
            return False
        while frame is not None and not is_our_file(frame.f_code.co_filename):
            frame = frame.f_back
        return frame is not None and frame.f_code is run_users.__code__


_iterating: ContextVar[InterruptibleIteration | None] = ContextVar("iterating", default=None)


def deliver_waiting() -> None:
    """Call the handlers of signals that wait; to be called where an exception is undone."""
    iterating = _iterating.get()
    if iterating is not None and iterating._caught:
        iterating.deliver()


def run_users(function: Callable[..., _R], /, *args: Any, **kwargs: Any) -> _R:
    """Call a function of the user's, in which signals come through."""
    return function(*args, **kwargs)


def _owner(handler: _Handler) -> DeferredInterrupts | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, DeferredInterrupts) else None
