"""What is left of a capture that the driver has broken, and how torch gets over it.

Not run on a GPU yet.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch

_Pool = tuple[int, int]


def has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Tell whether a capture came to its proper end, be it before an exception or because of it."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def end_broken_capture(
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    pool: _Pool,
    generators: Sequence[torch.Generator],
) -> bool:
    """Bring torch's allocator and generators out of a capture that could not be ended.

    Note [Broken captures]: what a capture must not do (a host read, a stream that was not joined)
    makes the driver throw the capture away, and then torch leaves out the rest of what ends one:
    the allocator goes on believing that a capture is under way, so that the next
    ``torch.cuda.empty_cache``, and with it the next capture, fails an assertion; and before torch
    2.13 generators refuse every draw outside a capture. The allocator is told that the capture is
    over, and the generators take part in another, tiny one. The graph itself has to be kept: the
    allocator of pinned memory goes on asking it.

    Args:
        graph: The graph, which ``has_ended`` does not hold of.
        device: Where it was captured.
        pool: The pool that it was captured into.
        generators: Those that it knows, the default one excepted.

    Returns:
        Whether the pool can be used by another capture.
    """
    with suppress(RuntimeError):  # nothing was instantiated
        graph.reset()
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # it never began, or a later torch has ended it
        return False
    try:
        torch._C._cuda_releasePool(device.index, pool)
        _end_generators(device, generators)
    except RuntimeError:  # the error of the capture is the one to tell
        return False
    return True


def _end_generators(device: torch.device, generators: Sequence[torch.Generator]) -> None:
    number = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    stream = torch.cuda.Stream(device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        number.zero_()
    graph.reset()
