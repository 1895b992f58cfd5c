"""In which order an epoch visits its windows: a permutation that is computed, never stored."""

import numpy as np
import numpy.typing as npt

_Numbers = npt.NDArray[np.uint64]
_ROUNDS = 6


class EpochOrder:
    """Maps the number of a sample, counted from the start of a training, to a window.

    Each epoch visits each window once, in an order of its own that depends on seed and epoch alone.
    So a position is one number, and any rank finds any sample without a table of all of them.

    Source: Luby and Rackoff 1988 (permutations from Feistel networks); Black and Rogaway 2002,
        section 3 (cycle walking: what falls outside of the range is permuted again).
    """

    def __init__(self, num_windows: int, seed: int) -> None:
        self._num_windows = num_windows
        self._half = np.uint64(max((num_windows - 1).bit_length() + 1, 2) // 2)
        self._seed = seed

    def __call__(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        epochs, places = np.divmod(samples, self._num_windows)
        keys = mixed(epochs.astype(np.uint64) + mixed(np.full(1, self._seed, np.uint64)))
        found = self._permuted(places.astype(np.uint64), keys)
        while (outside := found >= self._num_windows).any():
            found[outside] = self._permuted(found[outside], keys[outside])
        return found.astype(np.int64)

    def _permuted(self, values: _Numbers, keys: _Numbers) -> _Numbers:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = values >> self._half, values & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mixed(right + mixed(keys + np.uint64(turn))) & mask)
        return (left << self._half) | right


def mixed(values: _Numbers) -> _Numbers:
    """Return numbers in which each bit depends on all bits of the given ones.

    Source: Steele, Lea and Flood 2014 (SplitMix64).
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
