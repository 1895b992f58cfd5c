"""Clocks that run ahead: what tells the time, in the users' code, tells a later one."""

import datetime
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graphfsdp._capture.python.places import Place
from graphfsdp._capture.trace.source import called_by_us, user_source_line
from graphfsdp.base.hazards import SourceLine

ClockReads = list[tuple[str, SourceLine | None]]
# Functions that tell the time, and the classes with methods that do.
CLOCKS = frozenset(
    {
        *(time.time, time.time_ns, time.monotonic, time.monotonic_ns),
        *(time.perf_counter, time.perf_counter_ns, time.process_time, time.process_time_ns),
        *(time.thread_time, time.thread_time_ns, time.localtime, time.gmtime),
        *(time.ctime, time.asctime, time.strftime),
        *(datetime.datetime, datetime.date),
    }
)
_NOW, _IN_PARTS = time.time, time.localtime  # whatever these names are bound to meanwhile
_OF_SECONDS = ("localtime", "gmtime", "ctime")  # or of now, if none are given
_OF_PARTS = types.MappingProxyType({"asctime": 0, "strftime": 1})  # the same, behind so many more


@contextmanager
def ahead(clocks: Sequence[Place], seconds: float) -> Iterator[ClockReads]:
    """Let clocks go ahead in the body; yield a list of those that were read, and where.

    The names in the users' code are bound to other functions meanwhile, and to nothing of
    anybody else's but the module ``time``.
    """
    read: ClockReads = []
    try:
        for place in clocks:
            place.set(_shifted(place.value, seconds, read))
        yield read
    finally:
        for place in clocks:
            place.set(place.value)


def _shifted(clock: Any, seconds: float, read: ClockReads) -> Any:
    if isinstance(clock, type):
        return _shifted_dates(clock, seconds, read)
    name = clock.__name__
    units = 10**9 if name.endswith("_ns") else 1

    def now(*args: Any) -> Any:
        if called_by_us():  # a log line of ours, a deadline
            return clock(*args)
        if name in _OF_SECONDS or name in _OF_PARTS:
            if len(args) > _OF_PARTS.get(name, 0):
                return clock(*args)
            later: Any = _NOW() + seconds
            read.append((f"time.{name}", user_source_line()))
            return clock(*args, later if name in _OF_SECONDS else _IN_PARTS(later))
        read.append((f"time.{name}", user_source_line()))
        value = clock(*args)
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
