"""Streams and captures of a GPU, ranges that profilers show, and the garbage collector kept out.

Without a stream, on a CPU, nothing happens; ranges are shown in torch's profiler there.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from graphfsdp.base.torch_internals import profiler_is_on
from graphfsdp.errors import PhaseError

_TURN_LIMIT_S = 600.0
_SLICE_S = 0.1
YOUNG = 1  # generation: what was made since the last long look at everything
_kept: ContextVar[list[object] | None] = ContextVar("kept", default=None)
# Before each name in torch's profiler, where operators are events like any other.
RANGE_PREFIX = "graphfsdp: "
_NO_RANGE = nullcontext()  # may be entered any number of times


@cache
def _turn() -> threading.RLock:
    return threading.RLock()


@contextmanager
def in_turn(ask: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Run the body while no other thread of this process is in such a body.

    While it waits for that, ``ask`` is called now and then, and may raise.

    Warm-ups and captures of all steps share one stream of a device, so what one thread launches
    there would be in the graph that another one captures; and what Python reads is watched on all
    threads. Replays need no turn.

    Raises:
        PhaseError: its turn did not come for ten minutes.
    """
    deadline = time.monotonic() + _TURN_LIMIT_S
    while not _turn().acquire(timeout=_SLICE_S):
        ask()
        if time.monotonic() > deadline:
            raise PhaseError(
                f"another thread has been in a warm-up or a capture for {_TURN_LIMIT_S:g} s, and "
                "only one at a time can be. Remedy: capture one step after the other; do not wait "
                "inside an iteration for a thread that calls another step"
            )
    try:
        yield
    finally:
        _turn().release()


@contextmanager
def forked(stream: "torch.cuda.Stream | None") -> Iterator[None]:
    """Run the body on ``stream``, ordered after the current stream and before what follows.

    Capture: legal inside one. CUDA rule: every stream that forks from a capturing stream must
        join it before the capture ends (error 904 otherwise), hence the wait on the way out.
    """
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


@dataclass(frozen=True)
class Lane:
    """Where collectives run while others compute: a side stream, or on a CPU gloo's threads."""

    stream: "torch.cuda.Stream | None" = None

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Run the body on the lane, ordered after the current stream; nobody waits for it yet.

        Capture: legal inside one if what is begun here is waited for before it ends.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """In a capture, let the current stream wait for all that was begun here in the same one.

        Capture: one dependency at most; outside of captures nothing.
        """
        if self.stream is None or not is_capturing():
            return
        current = torch.cuda.current_stream(self.stream.device)
        with torch.cuda.stream(self.stream):
            has_begun = is_capturing()  # else to wait for it would leave the capture (error 905)
        if has_begun:
            current.wait_stream(self.stream)


def stream_of(tensor: Tensor) -> "torch.cuda.Stream | None":
    """Return the current stream of a tensor's device, None on a CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def keep_for_current(tensors: Iterable[Tensor], made_on: "torch.cuda.Stream | None") -> None:
    """Have memory kept that another stream was given, until the current one is through with it.

    The allocator gives memory out again in the order of the stream that it was made on.
    """
    if made_on is None or made_on == torch.cuda.current_stream(made_on.device):
        return
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(made_on.device))


def is_capturing() -> bool:
    """Tell whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def collecting_kept() -> Iterator[list[object]]:
    """Collect what the graph that the body captures must keep alive."""
    kept: list[object] = []
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def keep_for_graph(thing: object, otherwise: list[object]) -> None:
    """Have the graph that is being captured, if there is one, keep what it knows by address only.

    On the thread of the capture, not on one of autograd's.

    Args:
        thing: Goes with the graph, if nobody else holds it.
        otherwise: Where it is kept if the graph is captured by hand, and keeps nothing.
    """
    if not is_capturing():
        return
    collected = _kept.get()
    kept = otherwise if collected is None else collected
    if not any(other is thing for other in kept):
        kept.append(thing)


_has_nvtx = cache(torch.cuda.is_available)


def nvtx_range(name: str) -> AbstractContextManager[object]:
    """Capture: host side only; inside a recording it marks the host's time, not the kernels'."""
    # A range costs microseconds even when no profiler listens, and a CPU-only machine has none.
    nvtx = torch.cuda.nvtx.range(RANGE_PREFIX + name) if _has_nvtx() else _NO_RANGE
    return _profiled(name, nvtx) if profiler_is_on() else nvtx


@contextmanager
def _profiled(name: str, nvtx: AbstractContextManager[object]) -> Iterator[None]:
    # Not torch.profiler.record_function, which is an operator: a recording would hold it.
    with nvtx, _RecordFunctionFast(RANGE_PREFIX + name):
        yield


@contextmanager
def without_collector(generation: int = 2) -> Iterator[None]:
    """Collect now, up to a generation, and then not before the body is over.

    Whatever a finaliser does in the middle of a recording would become a part of the graph: an
    operator of a user's ``__del__`` would run in every replay, and freeing CUDA memory is not
    permitted in a capture. Into a measurement it would come at any time.

    A whole collection walks over all that torch has imported: a tenth of a second.
    """
    gc.collect(generation)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
