"""What a function's code names, and the numbers in it."""

import datetime
import time
import types

from graphfsdp._capture.trace.reach import INDIRECT

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


def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes, and strings where code looks up by strings."""
    found = set(code.co_names)
    if found & INDIRECT:
        found |= {constant for constant in code.co_consts if isinstance(constant, str)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
    return frozenset(found)


def numbers_in(code: types.CodeType) -> frozenset[float]:
    """Return the constants of a function that are numbers."""
    found: set[float] = set()
    for constant in code.co_consts:
        items = constant if isinstance(constant, tuple) else (constant,)
        found |= {item for item in items if type(item) in (int, float)}
        if isinstance(constant, types.CodeType):
            found |= numbers_in(constant)
    return frozenset(found)
