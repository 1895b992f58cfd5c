"""Batches of tokens: windows of an epoch in their order, packed documents, fixed validation.

Shapes: B = sequences of a batch, T = tokens of a sequence.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphfsdp.data.corpus import Corpus, TokenArray
from graphfsdp.errors import ConfigError

# What torch's cross-entropy leaves out.
IGNORED_TARGET = -100

Batch = tuple[Tensor, ...]
_Numbers = npt.NDArray[np.uint64]
_TURNS = np.arange(8, dtype=np.uint64)[:, None]  # of the cipher that EpochOrder is


class TokenBatches:
    """An endless iterator over this rank's parts of a training's batches, on the CPU.

    The training part is cut into windows; an epoch visits each once, in an order that depends on
    the seed and the number of the epoch alone. Ranks that train together go through the same
    windows and take a part of each batch, whatever their number. So the position in the data is one
    number, the same on all ranks, and nothing is drawn from torch's generators.

    A batch is tokens and targets, [B, T] int64. With ``positions`` there is a third tensor of that
    shape: the place of each token in its document, from 0. A document's tokens are neighbours, so
    this says too which tokens belong together: each 0 begins another document.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_length: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        vocab_size: int | None = None,
        eod_token: int | None = None,
        positions: bool = False,
        mask_first: bool = False,
    ) -> None:
        """ConfigError if the corpus is too small, or nothing says where documents end.

        Args:
            corpus: What to train on.
            seq_length: T.
            batch_size: Sequences of a batch, all micro-batches and ranks together.
            seed: Decides the order.
            rank: Which part of each batch to take.
            num_ranks: How many parts there are.
            vocab_size: Tokens from here on are refused.
            eod_token: Ends each document.
            positions: Give the place of each token in its document.
            mask_first: A document's first token is no target: nothing before it tells of it.
        """
        for tokens, name in ((corpus.train, "training"), (corpus.validation, "held-out")):
            if len(tokens) < seq_length + 1:
                raise ConfigError(
                    f"--seq-length {seq_length} needs {seq_length + 1} tokens in a row, but the "
                    f"{name} part of {corpus.name} has {len(tokens)}; give a smaller "
                    f"--seq-length or a larger --data"
                )
        if (positions or mask_first) and eod_token is None:
            raise ConfigError(
                f"{corpus.name} does not say where documents end; give eod_token, the token that "
                "ends each of them"
            )
        self._corpus = corpus
        self._seq_length = seq_length
        self._batch_size = batch_size
        size = batch_size // num_ranks
        self._part = np.arange(rank * size, (rank + 1) * size)
        self._num_windows = (len(corpus.train) - 1) // seq_length
        self._order = EpochOrder(self._num_windows, seed)
        self._vocab_size = vocab_size
        self._eod_token = eod_token
        self._positions = positions
        self._mask_first = mask_first
        self._next_sample = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self._next_sample)
        self._next_sample += self._batch_size
        return batch

    def batch(self, first_sample: int) -> Batch:
        """Return this rank's part of the batch that begins with a sample, counted from 0."""
        windows = self._order(first_sample + self._part)
        return self._cut(self._corpus.train, windows * self._seq_length)

    def state_dict(self) -> dict[str, int]:
        """Return the position, which is the same on every rank and fits any number of them."""
        return {"next_sample": self._next_sample}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another iterator was."""
        self._next_sample = int(state["next_sample"])

    def validation_batches(
        self, num_batches: int, batch_size: int, chosen: Iterable[int] | None = None
    ) -> Iterator[Batch]:
        """Yield the same batches at each call: windows at even distances in the held-out part.

        Of all batches only those with the chosen numbers, if these are given.
        """
        held_out = self._corpus.validation
        last_start = len(held_out) - self._seq_length - 1
        starts = np.linspace(0, last_start, num_batches * batch_size).astype(np.int64)
        batches = starts.reshape(num_batches, batch_size)
        for number in range(num_batches) if chosen is None else chosen:
            yield self._cut(held_out, batches[number])

    def _cut(self, part: TokenArray, starts: npt.NDArray[np.int64]) -> Batch:
        """Cut windows out of a part of the corpus."""
        windows = part[starts[:, None] + np.arange(self._seq_length + 1)].astype(np.int64)
        if (
            self._vocab_size is not None
            and not 0 <= windows.min() <= windows.max() < self._vocab_size
        ):
            raise ConfigError(
                f"{self._corpus.name} has tokens from {windows.min()} to {windows.max()}, the "
                f"vocabulary has {self._vocab_size}; give a larger --vocab-size, or look at the "
                "dtype that the file was written in"
            )
        tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        if not (self._positions or self._mask_first):
            return torch.from_numpy(tokens), torch.from_numpy(targets)
        first = np.zeros(windows.shape, dtype=np.bool_)  # of a document
        first[:, 1:] = windows[:, :-1] == self._eod_token
        if self._mask_first:
            targets[first[:, 1:]] = IGNORED_TARGET
        arrays = [tokens, targets]
        if self._positions:
            count = np.arange(self._seq_length)
            # What a window begins with is taken for the begin of a document.
            begins = np.maximum.accumulate(np.where(first[:, :-1], count, 0), axis=1)
            arrays.append(count - begins)
        return tuple(torch.from_numpy(array) for array in arrays)


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
        """Return the windows of samples."""
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
