"""Tokens on their way into a training (docs/data.md): files, their order, batches, a feed of them.

Files are Python's own standard library, text files, or a token file; of windows of an epoch in
their order, packed documents and fixed validation batches are made, and ``Feed``, which takes any
loader, has batches there before they are asked for. Token files are mapped and never read as a
whole:

- ``X.bin``: little-endian uint16, nothing else, as nanoGPT writes it;
- ``X.npy``: a one-dimensional array of integers, as ``numpy.save`` writes it.

Shapes: B = sequences of a batch, T = tokens of a sequence.
"""

import copy
import math
import queue
import sysconfig
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphfsdp.base.torch_internals import tree_map_only
from graphfsdp.errors import ConfigError

__all__ = [
    "BYTES_VOCAB_SIZE",
    "IGNORED_TARGET",
    "Batch",
    "Corpus",
    "Feed",
    "TokenBatches",
    "is_token_file",
    "load_corpus",
]

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

    corpus: Corpus
    _: KW_ONLY
    seq_length: int
    batch_size: int
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1
    vocab_size: int | None = None
    eod_token: int | None = None
    positions: bool = False
    mask_first: bool = False

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


class Feed:
    """Iterates over a loader, ahead of the training, and says how long the training waited.

    Takes any iterable: ``TokenBatches``, a ``DataLoader``, torchdata's ``StatefulDataLoader``.
    A thread takes batches from it while the model computes. For a GPU each is then copied, from
    page-locked memory and on a stream of its own, while the iteration before it runs: into new
    memory, never into what a graph reads, which is written in the stream's order by the step.
    What the loader has yielded is read before it is asked again, so it may fill the same tensors
    anew each time.

    In a checkpoint (``objects={"data": feed}``) it keeps the loader's state as it was after the
    batch that was handed out last, whatever was taken ahead.
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device | str | None = None, *, ahead: int = 2
    ) -> None:
        """Start nothing yet.

        Args:
            loader: Yields batches; lists, tuples and dicts of tensors, and what else
                there is. If it has ``state_dict``, this is asked for after each batch.
            device: Where the tensors are handed out; as they come, if it is None or a CPU.
            ahead: Batches that the thread holds, at least 1.
        """
        if ahead < 1:
            raise ConfigError(f"ahead must be at least 1, got {ahead}")
        self._loader: Any = loader
        self._ahead = ahead
        self._device = None if device is None else torch.device(device)
        on_gpu = self._device is not None and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # of the copies
        self._state: Any = None
        self._running = 0
        self.waited_s = 0.0  # that whoever iterates has spent in here

    def __iter__(self) -> Generator[Any, None, None]:
        """Go through the loader once, from where it is."""
        # What is its own iterator goes on from where it was; of others each loop begins anew.
        goes_on = isinstance(self._loader, Iterator) and hasattr(self._loader, "load_state_dict")
        if goes_on:
            self._state = copy.deepcopy(self._loader.state_dict())
        source = _Source(self._loader, self._ahead, pins=self._stream is not None)
        self._running += 1
        try:
            began = time.perf_counter()
            item = self._copied(source.take())
            while item is not None:
                if item.error is not None:
                    raise item.error
                following = None
                if self._stream is not None:
                    following = self._copied(source.take(waits=False))
                    self._hand_over(item)
                self._state = item.state
                self.waited_s += time.perf_counter() - began
                yield item.batch
                began = time.perf_counter()
                item = following if following is not None else self._copied(source.take())
        finally:
            self._running -= 1
            source.close()
            if goes_on:
                self._loader.load_state_dict(self._state)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> Any:
        """Return the loader's state after the batch that was handed out last."""
        if self._state is None:
            return self._loader.state_dict()
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Have the loader go on from a state; the next ``iter`` begins there.

        Raises:
            ConfigError: the loader is being iterated over, and batches were taken already.
        """
        if self._running:
            raise ConfigError(
                "a state was loaded into a Feed that is being iterated over, which has taken "
                "batches ahead. Remedy: load before the loop, or end the loop first"
            )
        self._loader.load_state_dict(state)
        self._state = None

    def _copied(self, item: "_Item | None") -> "_Item | None":
        """Copy a batch to a GPU, behind nothing that runs on it."""
        if self._stream is None or item is None or item.error is not None:
            return item

        def copy_of(tensor: Tensor) -> Tensor:
            return tensor.to(self._device, non_blocking=True)

        with torch.cuda.stream(self._stream):
            item.batch = tree_map_only(Tensor, copy_of, item.batch)
            item.copied = self._stream.record_event()
        return item

    def _hand_over(self, item: "_Item") -> None:
        """Have the current stream wait for the copy, and the memory live as long as it reads."""
        stream = torch.cuda.current_stream(self._device)
        assert item.copied is not None
        stream.wait_event(item.copied)
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(stream), item.batch)


@dataclass
class _Item:
    """What a loader gave: a batch and the state after it, or an error."""

    batch: Any = None
    state: Any = None
    error: BaseException | None = None
    copied: torch.cuda.Event | None = None


class _Source:
    """Takes batches from a loader, in a thread.

    Note [Signals]: a handler that raises (Ctrl-C) in between the lines of ``queue.Queue`` or of an
    Event leaves its lock taken, and the other thread waits for ever. ``SimpleQueue`` has none.
    """

    def __init__(self, loader: Any, ahead: int, *, pins: bool) -> None:
        self._loader = loader
        self._pins = pins
        self._iterator: Iterator[Any] | None = None
        self._closed = self._ended = False
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # for so many batches more
        for _ in range(ahead):
            self._room.put(None)
        # What a loader does on a GPU goes where it would go in the loop itself: device and stream
        # are each thread's own.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._work, name="graphfsdp-feed", daemon=True)
        self._thread.start()

    def take(self, *, waits: bool = True) -> _Item | None:
        """Return the next batch, None after the last, or if it is not there and nobody waits."""
        if self._ended:
            return None
        try:
            item = self._queue.get(block=waits)
        except queue.Empty:
            return None
        self._room.put(None)
        self._ended = item is None or item.error is not None
        return item

    def close(self) -> None:
        self._closed = True
        self._room.put(None)  # it may wait for that
        self._thread.join()

    def _work(self) -> None:
        item: _Item | None = _Item()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            while item is not None and item.error is None and not self._closed:
                item = self._pull()
                self._room.get()
                self._queue.put(item)

    def _pull(self) -> _Item | None:
        try:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            batch = tree_map_only(Tensor, self._own, next(self._iterator))
            if not hasattr(self._loader, "state_dict"):
                return _Item(batch)
            return _Item(batch, copy.deepcopy(self._loader.state_dict()))
        except StopIteration:
            return None
        except BaseException as error:  # whoever waits for the batch gets it
            return _Item(error=error)

    def _own(self, tensor: Tensor) -> Tensor:
        """Return a copy that the loader does not write into, for a GPU in page-locked memory.

        Also of what is page-locked: the loader may fill it with the next batch before the copy to
        the device, which nobody waits for, has run.
        """
        if not self._pins or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return tensor.detach().clone()
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
