"""Who is told what goes on where a call takes long: a progress bar, if somebody shows one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
