"""Reads many words of this process's memory in one call."""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

WORD = 8  # bytes
_FIRST = 4096  # no object lies in the first page
_NUM_BYTES = 1 << 48  # what a 64-bit process may use

Indices = npt.NDArray[np.int64]


class ProcessMemory:
    """The words that objects of this process consist of, for comparisons of very many of them.

    Note [Words]: to ask 1,500 tensors for their address takes 80 us, since each answer passes
    through Python's and torch's calls; to gather 1,500 words of memory takes 3 us. So a guard may
    compare the words that hold an answer instead of asking. Nothing is known of the layout of
    objects beforehand: which words matter is learned by changing objects made for it and looking
    what changed (``tensor_words.py``, ``dict_words.py``). What cannot be learned is asked, as ever.
    Only objects that the guard keeps alive are read, and what they point to only after the words
    that point there were found unchanged.
    """

    def __init__(self) -> None:
        self._words = np.asarray(_Everything())
        self._take = self._words.take

    @staticmethod
    def is_readable() -> bool:
        """Tell whether ``id`` is an address here, and no other thread can write in between."""
        has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
        return sys.implementation.name == "cpython" and sys.maxsize > 2**32 and has_lock

    def read(self, address: int, num_words: int) -> list[int]:
        """Return the words from an address on.

        Args:
            address: Of an object that lives, in bytes; a multiple of 8.
            num_words: Not more than the object has.
        """
        start = (address - _FIRST) // WORD
        return [int(word) for word in self._words[start : start + num_words]]

    def indices(self, addresses: list[int]) -> Indices:
        """Return where ``gather`` finds the words at these addresses (bytes, multiples of 8)."""
        return (np.array(addresses, dtype=np.int64) - _FIRST) // WORD

    def gather(self, indices: Indices) -> bytes:
        """Return the words at these places, one after another."""
        return self._take(indices).tobytes()


class _Everything:
    """Tells NumPy to take all memory for one array of words that is only read."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        shape = ((_NUM_BYTES - _FIRST) // WORD,)
        return {"data": (_FIRST, True), "typestr": "<u8", "shape": shape, "version": 3}
