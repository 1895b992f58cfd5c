"""What is trained on, and batches of it.

Python's own standard library, text files, or a token file; windows of an epoch in their order,
packed documents, fixed validation. Token files are mapped and never read as a whole:

- ``X.bin``: little-endian uint16, nothing else, as nanoGPT writes it;
- ``X.npy``: a one-dimensional array of integers, as ``numpy.save`` writes it.

Shapes: B = sequences of a batch, T = tokens of a sequence.
"""

import math
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphfsdp.errors import ConfigError

TokenArray = npt.NDArray[Any]  # of integers

BYTES_VOCAB_SIZE = 256
_SKIPPED_IN_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# As git decides: a file with a zero byte near its start is not text.
_LOOKED_AT_BYTES = 8000
# What torch's cross-entropy leaves out.
IGNORED_TARGET = -100

Batch = tuple[Tensor, ...]
_Numbers = npt.NDArray[np.uint64]
_TURNS = np.arange(8, dtype=np.uint64)[:, None]  # of the cipher that EpochOrder is


@dataclass(frozen=True)
class Corpus:
    """Tokens, cut into what is trained on and what is held out."""

    name: str  # for messages
    train: TokenArray
    validation: TokenArray  # what follows, never trained on


def load_corpus(path: str | None, *, held_out_percent: float = 5.0) -> Corpus:
    """Read a text file, a directory of text files, or a file of tokens.

    None is the standard library's source files.
    """
    name = path or f"Python {sysconfig.get_python_version()} standard library"
    try:
        if path is not None and is_token_file(path):
            tokens = _open_token_file(Path(path))
        else:
            texts = _texts(path)
            tokens = np.frombuffer(b"\n".join(texts), dtype=np.uint8)
            name += f" ({len(texts)} files)" if len(texts) > 1 else ""
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"--data {path}: cannot be read ({reason}); give a text file, a directory of text "
            f"files, a .bin file of uint16 tokens, or a .npy file of integers"
        ) from None
    if not len(tokens):
        raise ConfigError(f"--data {name}: holds no text; give a file or a directory that does")
    border = len(tokens) - math.ceil(held_out_percent / 100 * len(tokens))
    return Corpus(name, tokens[:border], tokens[border:])


def _texts(path: str | None) -> list[bytes]:
    if path is None:
        library = _walk(Path(sysconfig.get_path("stdlib")), _SKIPPED_IN_LIBRARY)
        return [file.read_bytes() for file in library if file.suffix == ".py"]
    where = Path(path)
    if not where.is_dir():
        return [where.read_bytes()]
    contents = (file.read_bytes() for file in _walk(where))
    return [each for each in contents if each and b"\0" not in each[:_LOOKED_AT_BYTES]]


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files under ``root`` in an order that is the same on every machine."""
    for entry in sorted(root.iterdir(), key=lambda path: path.name):
        if entry.name.startswith(".") or entry.name in skipped:
            continue
        if entry.is_file():
            yield entry
        elif entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry, skipped)


def is_token_file(path: str | Path) -> bool:
    """Tell by its name whether a file holds tokens, and not a text."""
    return Path(path).suffix in (".bin", ".npy")


def _open_token_file(path: Path) -> TokenArray:
    """OSError if it cannot be read, ConfigError if it holds something else."""
    if path.suffix == ".npy":
        try:
            tokens: TokenArray = np.lib.format.open_memmap(path, mode="r")
        except (ValueError, EOFError) as error:
            raise ConfigError(
                f"--data {path}: is no .npy file that can be mapped ({error})"
            ) from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
            raise ConfigError(
                f"--data {path}: holds {tokens.dtype} of shape {tokens.shape}; expected tokens as "
                "integers in one dimension. Write it with numpy.save(path, tokens.ravel())"
            )
        return tokens
    if path.with_suffix(".idx").exists():  # else its tokens might be taken for others
        raise ConfigError(
            f"--data {path}: belongs to {path.with_suffix('.idx').name}, an index as Megatron "
            "writes it; docs/data.md has the lines that make a .npy file of both"
        )
    size_bytes = path.stat().st_size
    if size_bytes == 0 or size_bytes % 2:
        raise ConfigError(
            f"--data {path}: a .bin file holds 2 bytes (uint16) per token, this one has "
            f"{size_bytes} bytes; write it with numpy.ndarray.astype('<u2').tofile(...)"
        )
    return np.memmap(path, dtype="<u2", mode="r")


@dataclass(eq=False, repr=False)
class TokenBatches:
    """An endless iterator over this rank's parts of a training's batches, on the CPU.

    The training part is cut into windows; an epoch visits each once, in an order that depends on
    the seed and the number of the epoch alone. Ranks that train together go through the same
    windows and take a part of each batch, whatever their number. So the position in the data is one
    number, the same on all ranks, and nothing is drawn from torch's generators.

    A batch is tokens and targets, [B, T] int64. With ``positions`` there is a third tensor of that
    shape: the place of each token in its document, from 0. A document's tokens are neighbours, so
    this says too which tokens belong together: each 0 begins another document.

    ConfigError if the corpus is too small, or nothing says where documents end.
    """

    corpus: Corpus
    _: KW_ONLY
    seq_length: int  # T
    batch_size: int  # sequences of a batch, all micro-batches and ranks together
    seed: int = 0  # decides the order
    rank: int = 0  # which part of each batch to take
    num_ranks: int = 1  # how many parts there are
    vocab_size: int | None = None  # tokens from here on are refused
    eod_token: int | None = None  # ends each document
    positions: bool = False  # give the place of each token in its document
    mask_first: bool = False  # a document's first token is no target: nothing before it tells of it

    def __post_init__(self) -> None:
        corpus, seq_length = self.corpus, self.seq_length
        for tokens, name in ((corpus.train, "training"), (corpus.validation, "held-out")):
            if len(tokens) < seq_length + 1:
                raise ConfigError(
                    f"--seq-length {seq_length} needs {seq_length + 1} tokens in a row, but the "
                    f"{name} part of {corpus.name} has {len(tokens)}; give a smaller "
                    f"--seq-length or a larger --data"
                )
        if (self.positions or self.mask_first) and self.eod_token is None:
            raise ConfigError(
                f"{corpus.name} does not say where documents end; give eod_token, the token that "
                "ends each of them"
            )
        size = self.batch_size // self.num_ranks
        self._part = np.arange(self.rank * size, (self.rank + 1) * size)
        self._order = EpochOrder((len(corpus.train) - 1) // seq_length, self.seed)
        self._next_sample = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self._next_sample)
        self._next_sample += self.batch_size
        return batch

    def batch(self, first_sample: int) -> Batch:
        """Return this rank's part of the batch that begins with a sample, counted from 0."""
        windows = self._order(first_sample + self._part)
        return self._cut(self.corpus.train, windows * self.seq_length)

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
        held_out = self.corpus.validation
        last_start = len(held_out) - self.seq_length - 1
        starts = np.linspace(0, last_start, num_batches * batch_size).astype(np.int64)
        batches = starts.reshape(num_batches, batch_size)
        for number in range(num_batches) if chosen is None else chosen:
            yield self._cut(held_out, batches[number])

    def _cut(self, part: TokenArray, starts: npt.NDArray[np.int64]) -> Batch:
        """Cut windows out of a part of the corpus."""
        windows = part[starts[:, None] + np.arange(self.seq_length + 1)].astype(np.int64)
        if (
            self.vocab_size is not None
            and not 0 <= windows.min() <= windows.max() < self.vocab_size
        ):
            raise ConfigError(
                f"{self.corpus.name} has tokens from {windows.min()} to {windows.max()}, the "
                f"vocabulary has {self.vocab_size}; give a larger --vocab-size, or look at the "
                "dtype that the file was written in"
            )
        tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        if not (self.positions or self.mask_first):
            return torch.from_numpy(tokens), torch.from_numpy(targets)
        first = np.zeros(windows.shape, dtype=np.bool_)  # of a document
        first[:, 1:] = windows[:, :-1] == self.eod_token
        if self.mask_first:
            targets[first[:, 1:]] = IGNORED_TARGET
        arrays = [tokens, targets]
        if self.positions:
            count = np.arange(self.seq_length)
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
