"""Clocks that run ahead: what tells the time, in the users' code, tells a later one."""

import datetime
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graphfsdp._capture.trace.source import user_source_line
from graphfsdp.base.hazards import SourceLine

Held = Sequence[tuple[dict[str, Any], str]]  # tables of names, with a name of a clock
ClockReads = list[tuple[str, SourceLine | None]]


@contextmanager
def ahead(clocks: Held, seconds: float) -> Iterator[ClockReads]:
    """Let clocks go ahead in the body; yield a list of those that were read, and where.

    The names in the users' code are bound to other functions meanwhile, and to nothing of
    anybody else's but the module ``time``.
    """
    read: ClockReads = []
    before = [(table, key, table[key]) for table, key in clocks]
    try:
        for table, key, clock in before:
            table[key] = _shifted(clock, seconds, read)
        yield read
    finally:
        for table, key, clock in before:
            table[key] = clock


def _shifted(clock: Any, seconds: float, read: ClockReads) -> Any:
    if isinstance(clock, type):
        return _shifted_dates(clock, seconds, read)
    units = 10**9 if clock.__name__.endswith("_ns") else 1

    def now() -> Any:
        read.append((f"time.{clock.__name__}", user_source_line()))
        value = clock()
        return value + type(value)(seconds * units)

    return now


def _shifted_dates(kind: Any, seconds: float, read: ClockReads) -> Any:
    def reader(name: str) -> Callable[..., Any]:
        def now(*args: Any, **kwargs: Any) -> Any:
            read.append((f"{kind.__name__}.{name}", user_source_line()))
            return getattr(kind, name)(*args, **kwargs) + datetime.timedelta(seconds=seconds)

        return now

    names = [name for name in ("now", "utcnow", "today") if hasattr(kind, name)]
    methods = {name: staticmethod(reader(name)) for name in names}

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, kind)

    return types.new_class(
        kind.__name__, (kind,), {"metaclass": Kind}, lambda body: body.update(methods)
    )
