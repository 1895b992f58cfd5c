"""Memory for undo copies that raises the peak of a recording as little as possible."""

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

_FIRST_BYTES = 1 << 20  # of a mapping
_MOST_BYTES = 16 << 20
_GROWTH = 8  # a mapping is at least this part of what was handed out before


class UndoArena:
    """Hands out bytes from mappings of its own.

    Note [Undo memory]: a recording on a CPU copies what the iteration is about to overwrite,
    while the backward pass frees the activations. Small copies on the heap would break up the
    freed blocks, and the C library would keep the freed pages anyway: the peak would grow by all
    of the copies. So they lie in separate mappings, and before each new mapping the freed pages
    of the heap are given back to the system. Mappings are short at first, because the state of a
    small model may fit into one, and long later, because giving back takes milliseconds. Pages
    are also given back every few operators: what a recording keeps of each storage, and gradients,
    lie between the activations on the heap, so that freed ones do not join, and larger ones find
    no place.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._num_bytes = 0  # of all mappings

    def take(self, num_bytes: int) -> Tensor:
        """Return [B] uint8, B being at most ``num_bytes`` and at least 1."""
        if self._used == self._chunk.numel():
            give_back_freed_pages()
            length = min(max(self._num_bytes // _GROWTH, _FIRST_BYTES), _MOST_BYTES)
            self._chunk = torch.frombuffer(mmap.mmap(-1, length), dtype=torch.uint8)
            self._used = 0
            self._num_bytes += length
        end = min(self._used + num_bytes, self._chunk.numel())
        piece = self._chunk[self._used : end]
        self._used = end
        return piece


def give_back_freed_pages() -> None:
    """Let the system have the heap's pages that nobody uses, where it keeps them otherwise."""
    # glibc only; elsewhere the peak is a little higher.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def refuse_without_memory(num_bytes: int) -> None:
    """Ask for memory and give it back, so that who asks for less next is not refused.

    Raises:
        RuntimeError: there is not as much.
    """
    torch.empty(num_bytes, dtype=torch.uint8)  # never written, so no page of it comes to be


def resident_bytes() -> int | None:
    """Return how much memory this process has now; None where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * mmap.PAGESIZE
