"""Who is told what goes on where a call takes long: a progress bar, if somebody shows one."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic  # under this name: clocks that an iteration reads are set ahead

_told: ContextVar[Callable[[str], None] | None] = ContextVar("told", default=None)


@contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Have ``tell`` called with what goes on in the body, "" when it is over."""
    token = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(token)


def say(text: str) -> None:
    tell = _told.get()
    if tell is not None:
        tell(text)


@contextmanager
def shown_when_slow(text: str, after_s: float = 2.0) -> Iterator[None]:
    """Show what goes on in the body, if it lasts, where the errors go to a terminal.

    Whoever is told already (``telling``) shows it in a way of its own.
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
    try:
        with telling(tell):
            yield
    finally:
        is_over.set()
        shower.join()
