"""The stand-in's own functions, beside those of CUDA: attach numbers, choose orders, count."""

import ctypes
import functools
import os
from typing import Any, NamedTuple

# What stand_in_attach answers.
DONE, CAPTURED, INVALID, NO_NODE, FAILED, QUEUED = range(6)
COMPUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)


def is_below() -> bool:
    """Return whether this process runs above the stand-in."""
    return "CUDA_STAND_IN" in os.environ


def computes() -> bool:
    """Return whether there are numbers: below Inductor's kernels, a rehearsal has none."""
    return not is_below() or os.environ.get("CUDA_STAND_IN_KERNELS") != "none"


@functools.cache
def functions() -> Any:
    """Return the library; its functions keep Python's lock."""
    found = ctypes.PyDLL("libcuda.so.1")
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
    found.stand_in_attach.argtypes = [pointer, number, ctypes.c_long]
    found.stand_in_begin_operator.argtypes = [pointer]
    found.stand_in_begin_operator.restype = ctypes.c_long
    found.stand_in_end_operator.restype = None
    found.stand_in_stream.argtypes = [pointer, ctypes.c_int]
    found.stand_in_stream.restype = pointer
    found.stand_in_capture_id.argtypes = [pointer]
    found.stand_in_capture_id.restype = number
    found.stand_in_take_forgotten.argtypes = [ctypes.POINTER(number), size]
    found.stand_in_take_forgotten.restype = size
    found.stand_in_choose.argtypes = [size, size]
    found.stand_in_choose.restype = None
    found.stand_in_touch.argtypes = [pointer, ctypes.c_char_p, pointer, size, ctypes.c_int]
    found.stand_in_touch.restype = None
    found.stand_in_take_races.argtypes = [ctypes.c_char_p, size]
    found.stand_in_take_races.restype = None
    found.stand_in_used_bytes.restype = size
    found.stand_in_counts.argtypes = [ctypes.POINTER(ctypes.c_long)]
    found.stand_in_counts.restype = None
    return found


def choose(*, streams: int = 0, order: int = 0) -> None:
    """Choose how work runs from now on.

    Args:
        streams: 0, each call does its work before it returns; otherwise the seed of a random
            interleaving of all streams that respects their events.
        order: 0, graphs run in the order of their capture; otherwise the seed of random orders
            that the dependencies of the nodes allow.
    """
    functions().stand_in_choose(streams, order)


class Counts(NamedTuple):
    """What has run so far, a graph's nodes included, and what the host has done for it.

    Copies count the bytes that they read and those that they write. ``calls`` have given a stream
    something to run, and ``launches`` are those and what went into captures; ``waits`` are the
    host's, for a stream, an event or a device.
    """

    kernels: int
    copies: int
    fills: int
    others: int
    moved_bytes: int
    graphs: int
    calls: int
    waits: int
    launches: int

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def counts() -> Counts:
    numbers = (ctypes.c_long * len(Counts._fields))()
    functions().stand_in_counts(numbers)
    return Counts(*numbers)


def take_races() -> str:
    """Return what was found since the last call in graphs that were captured.

    Each line names two nodes that touch the same memory, while neither waits for the other.
    """
    text = ctypes.create_string_buffer(1 << 14)
    functions().stand_in_take_races(text, len(text))
    return text.value.decode()
