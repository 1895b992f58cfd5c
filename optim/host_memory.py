"""Zeroed memory for optimizer state; on the CPU in huge pages where it is large."""

import mmap

import torch
from torch import Tensor

# Two huge pages: below, there is nothing to gain.
_SMALLEST_BYTES = 4 * 2**20


def zeros_flat(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [numel] zeros.

    A step streams through weight, gradient and moments at once. In pages of 4 KiB that many streams
    miss the processor's table of pages; torch asks for huge ones only if THP_MEM_ALLOC_ENABLE is
    set. Where the system has none to give, pages are small, as they would be anyway.
    """
    num_bytes = numel * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
    if device.type != "cpu" or num_bytes < _SMALLEST_BYTES or advice is None:
        return torch.zeros(numel, dtype=dtype, device=device)
    # Private: a process that is forked from this one gets its own copy of what it writes.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(advice)
    except OSError:  # a kernel without huge pages
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


__all__ = ["zeros_flat"]
