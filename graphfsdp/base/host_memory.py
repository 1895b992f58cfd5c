"""Large memory of the host on huge pages, where the system has them."""

import ctypes
import mmap

import torch
from torch import Tensor

_PAGE = 2 << 20  # bytes of a huge page, of x86-64 and of Arm with pages of 4 KiB
# Two huge pages: below, there is nothing to gain.
_SMALLEST_BYTES = 2 * _PAGE


def zeros_flat(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [numel] zeros.

    Note [Huge pages]: the processor keeps the addresses of some thousand pages at hand. In pages of
    4 KiB those are a few MiB, less than the matrices of one layer, or than the weights, gradients
    and moments that a step streams through at once. torch asks for huge pages only if
    THP_MEM_ALLOC_ENABLE is set. Where the system has none to give, pages are small, as they would
    be anyway.
    """
    num_bytes, advice = numel * dtype.itemsize, _advice()
    if device.type != "cpu" or num_bytes < _SMALLEST_BYTES or advice is None:
        return torch.zeros(numel, dtype=dtype, device=device)
    # Private: a process that is forked from this one gets its own copy of what it writes.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(advice)
    except OSError:  # a kernel without huge pages
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def advise_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask for huge pages under memory that torch has freshly allocated, see Note [Huge pages].

    A page that was written to stays as small as it is.
    """
    advice = _advice()
    if advice is None or storage.device.type != "cpu" or storage.nbytes() < _SMALLEST_BYTES:
        return
    start = -(-storage.data_ptr() // _PAGE) * _PAGE
    end = (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if end > start:
        madvise(start, end - start, advice)  # a kernel without them says so; pages stay small


def _advice() -> int | None:
    return getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
