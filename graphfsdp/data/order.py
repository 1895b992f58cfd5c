"""In which order an epoch visits its windows: a permutation that is computed, never stored."""

import math

import numpy as np
import numpy.typing as npt

_Numbers = npt.NDArray[np.uint64]
_TURNS = np.arange(8, dtype=np.uint64)[:, None]


class EpochOrder:
    """Maps the number of a sample, counted from the start of a training, to a window.

    Each epoch visits each window once, in an order of its own that depends on seed and epoch alone.
    So a position is one number, and any rank finds any sample without a table of all of them.

    Source: Black and Rogaway 2002 (Ciphers with arbitrary finite domains), sections 3 and 5.
        Windows lie in a nearly square table, where row and column take turns at being moved by a
        hash of the other one, which can be undone (a Feistel network); what falls on a place of the
        table without a window is moved again (cycle walking).
    """

    def __init__(self, num_windows: int, seed: int) -> None:
        self._num_windows = num_windows
        rows = math.isqrt(num_windows - 1) + 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-num_windows // rows))
        self._seed = _mixed(np.full(1, seed, np.uint64))

    def __call__(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        epochs, places = np.divmod(samples, self._num_windows)
        keys = _mixed(_mixed(epochs.astype(np.uint64) + self._seed) + _TURNS)
        found = self._moved(places.astype(np.uint64), keys)
        while (outside := found >= self._num_windows).any():
            found[outside] = self._moved(found[outside], keys[:, outside])
        return found.astype(np.int64)

    def _moved(self, places: _Numbers, keys: _Numbers) -> _Numbers:
        row, column = np.divmod(places, self._columns)
        for key, other in zip(keys[::2], keys[1::2], strict=True):
            row = (row + _mixed(column + key) % self._rows) % self._rows
            column = (column + _mixed(row + other) % self._columns) % self._columns
        return row * self._columns + column


def _mixed(values: _Numbers) -> _Numbers:
    """Return numbers in which each bit depends on all bits of the given ones.

    Source: Steele, Lea and Flood 2014 (SplitMix64).
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
