"""NVTX ranges of the host's time on CUDA, and torch's profiler where it runs."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Protocol

import torch
from torch._C._profiler import _RecordFunctionFast

from graphfsdp.base.torch_internals import profiler_is_on

# Before each name in torch's profiler, where operators are events like any other.
RANGE_PREFIX = "graphfsdp: "
_NO_RANGE = nullcontext()  # may be entered any number of times


class _RangeFactory(Protocol):
    def __call__(self, name: str) -> AbstractContextManager[object]: ...


@cache
def _factory() -> _RangeFactory | None:
    # A range costs microseconds even when no profiler listens, and a CPU-only machine has none.
    if not torch.cuda.is_available():
        return None
    try:
        import nvtx
    except ImportError:
        return lambda name: torch.cuda.nvtx.range(RANGE_PREFIX + name)  # it has no domains
    return lambda name: nvtx.annotate(name, domain="graphfsdp")


@contextmanager
def _profiled(name: str) -> Iterator[None]:
    # Not torch.profiler.record_function, which is an operator: a recording would hold it.
    factory = _factory()
    with factory(name) if factory else _NO_RANGE, _RecordFunctionFast(RANGE_PREFIX + name):
        yield


def nvtx_range(name: str) -> AbstractContextManager[object]:
    """Capture: host side only; inside a recording it marks the host's time, not the kernels'."""
    if profiler_is_on():
        return _profiled(name)
    factory = _factory()
    return factory(name) if factory else _NO_RANGE
