"""What goes on where a call takes long, for whoever sits at a terminal."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic  # under this name: clocks that an iteration reads are set ahead

_told: ContextVar[Callable[[str], None] | None] = ContextVar("told", default=None)


def say(text: str) -> None:
    """Tell what goes on within a call that is shown when it is slow, "" when that is over."""
    tell = _told.get()
    if tell is not None:
        tell(text)


@contextmanager
def shown_when_slow(text: str, after_s: float = 2.0) -> Iterator[None]:
    """Show what goes on in the body, if it lasts, where the errors go to a terminal.

    Of two such bodies, one in the other, the outer one is shown.
    """
    if _told.get() is not None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.status import Status

    is_over = threading.Event()
    started = monotonic()
    goes_on = text

    def tell(what: str) -> None:
        nonlocal goes_on
        goes_on = what or text

    def show() -> None:
        if is_over.wait(after_s):
            return
        with Status(text, console=Console(stderr=True)) as status:
            while not is_over.wait(0.5):
                status.update(f"{goes_on}, {monotonic() - started:.0f} s")

    # torch's modes and Python's profile hook belong to a thread each: this one has none of them.
    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    token = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(token)
        is_over.set()
        shower.join()
