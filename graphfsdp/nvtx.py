"""NVTX ranges: the `nvtx` package where installed, else torch's own on CUDA, else nothing."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch


class _RangeFactory(Protocol):
    def __call__(self, name: str) -> AbstractContextManager[object]: ...


def _no_range(name: str) -> AbstractContextManager[object]:
    return nullcontext()


@cache
def _factory() -> _RangeFactory:
    # A range costs microseconds even when no profiler listens, and a CPU-only machine has none.
    if not torch.cuda.is_available():
        return _no_range
    try:
        import nvtx
    except ImportError:
        return lambda name: torch.cuda.nvtx.range(name)
    return lambda name: nvtx.annotate(name, domain="graphfsdp")


def nvtx_range(name: str) -> AbstractContextManager[object]:
    """Return a context manager that shows as ``name`` in a profiler's timeline.

    Capture: host side only; inside a recording it marks the host's time, not the kernels'.
    """
    return _factory()(name)


__all__ = ["nvtx_range"]
