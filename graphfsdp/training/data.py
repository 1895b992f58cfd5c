"""Tokens and batches: random windows for training, fixed windows for validation.

Tokens are those of Python's own standard library, of text files, or of a token file.
Shapes: B = sequences of a batch, T = tokens of a sequence.
"""

import math
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphfsdp.errors import ConfigError

TokenArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

# The last part of the corpus, never trained on.
VALIDATION_FRACTION = 0.05
BYTES_VOCAB_SIZE = 256
# Counting tokens converts them to 64-bit integers, so large files are counted in pieces.
_PIECE_NUMEL = 1 << 24
_SKIPPED_IN_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# As git decides: a file with a zero byte near its start is not text.
_LOOKED_AT_BYTES = 8000
# A sample starts at a line that begins with a letter, if there is one among so many bytes.
_PROMPT_SEARCH_BYTES = 1 << 16


@dataclass(frozen=True)
class Corpus:
    name: str  # for the banner
    train: TokenArray  # the first 95 %
    validation: TokenArray
    vocab_size: int  # smallest that holds every token
    # Nats per token, tokens taken alone: the loss of the best model that looks at no context.
    unigram_entropy: float
    is_bytes: bool  # of text, so that a sample can be printed as text


def load_corpus(path: str | None) -> Corpus:
    """Read a text file, a directory of text files, or a ``.bin`` file of little-endian uint16.

    The last is mapped, not read; None is the standard library's source files.
    """
    if path is None:
        return _standard_library()
    where = Path(path)
    try:
        if where.is_dir():
            texts = [text for file in _walk(where) if _is_text(text := file.read_bytes())]
            if not texts:
                raise ConfigError(
                    f"--data {path}: the directory holds no text file; give another directory, "
                    f"or one file by its name"
                )
            return _from_bytes(f"{path} ({len(texts)} files)", b"\n".join(texts))
        if where.suffix == ".bin":
            return _from_token_file(where)
        return _from_bytes(path, where.read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"--data {path}: cannot be read ({reason}); give a text file, a directory of text "
            f"files, or a .bin file of uint16 tokens"
        ) from None


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, _SKIPPED_IN_LIBRARY) if file.suffix == ".py"]
    if not files:
        raise ConfigError(
            "--data: this Python carries no source files of its standard library to train on; "
            "give a text file with --data PATH"
        )
    version = sysconfig.get_python_version()
    name = f"Python {version} standard library ({len(files)} files)"
    return _from_bytes(name, b"\n".join(file.read_bytes() for file in files))


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files under ``root`` in an order that is the same on every machine."""
    for entry in sorted(root.iterdir(), key=lambda path: path.name):
        if entry.name.startswith(".") or entry.name in skipped:
            continue
        if entry.is_file():
            yield entry
        elif entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry, skipped)


def _is_text(content: bytes) -> bool:
    return bool(content) and b"\0" not in content[:_LOOKED_AT_BYTES]


def _from_bytes(name: str, text: bytes) -> Corpus:
    if not text:
        raise ConfigError(f"--data {name}: holds no text; give a file that does")
    return _split(name, np.frombuffer(text, dtype=np.uint8), is_bytes=True)


def _from_token_file(path: Path) -> Corpus:
    size_bytes = path.stat().st_size
    if size_bytes == 0 or size_bytes % 2:
        raise ConfigError(
            f"--data {path}: a .bin file holds 2 bytes (uint16) per token, this one has "
            f"{size_bytes} bytes; write it with numpy.ndarray.astype('<u2').tofile(...)"
        )
    return _split(str(path), np.memmap(path, dtype="<u2", mode="r"), is_bytes=False)


def _split(name: str, tokens: TokenArray, *, is_bytes: bool) -> Corpus:
    counts = np.zeros(1 << 16, dtype=np.int64)
    for start in range(0, len(tokens), _PIECE_NUMEL):
        counts += np.bincount(tokens[start : start + _PIECE_NUMEL], minlength=len(counts))
    seen = counts[counts > 0] / len(tokens)
    border = len(tokens) - math.ceil(VALIDATION_FRACTION * len(tokens))
    return Corpus(
        name=name,
        train=tokens[:border],
        validation=tokens[border:],
        vocab_size=BYTES_VOCAB_SIZE if is_bytes else int(counts.nonzero()[0][-1]) + 1,
        unigram_entropy=float(0.0 - (seen * np.log(seen)).sum()),
        is_bytes=is_bytes,
    )


class BatchSampler:
    """Cuts batches out of a corpus.

    The batch of a step depends on the seed and the step alone. So a resumed run needs no data
    position, and nothing is drawn from torch's global generator, which dropout uses. Ranks that
    train together draw the same batch and take a part of it each, whatever their number.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_length: int,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """``batch_size`` is in sequences, all micro-batches and ranks together."""
        for part, tokens in (("training", corpus.train), ("held-out", corpus.validation)):
            if len(tokens) < seq_length + 1:
                raise ConfigError(
                    f"--seq-length {seq_length} needs {seq_length + 1} tokens in a row, but the "
                    f"{part} part of {corpus.name} has {len(tokens)}; give a smaller "
                    f"--seq-length or a larger --data"
                )
        self._corpus = corpus
        self._window = np.arange(seq_length + 1)
        self._batch_size = batch_size
        size = batch_size // num_ranks
        self._part = slice(rank * size, (rank + 1) * size)
        self._seed = seed
        self._device = device

    def training_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's part of iteration ``step``, from 0: tokens and targets, [B, T]."""
        generator = np.random.default_rng((self._seed, step))
        num_starts = len(self._corpus.train) - len(self._window) + 1
        starts = generator.integers(num_starts, size=self._batch_size)
        return self._cut(self._corpus.train, starts[self._part])

    def validation_batches(
        self, num_batches: int, batch_size: int, chosen: Iterable[int] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same batches at each call: windows at even distances in the held-out part.

        Of all batches only those with the chosen numbers, if these are given.
        """
        last_start = len(self._corpus.validation) - len(self._window)
        starts = np.linspace(0, last_start, num_batches * batch_size).astype(np.int64)
        batches = starts.reshape(num_batches, batch_size)
        for number in range(num_batches) if chosen is None else chosen:
            yield self._cut(self._corpus.validation, batches[number])

    def prompt(self, num_tokens: int) -> Tensor:  # [1, num_tokens] int64
        """Return tokens of the held-out part for a sample to continue, near its start."""
        held_out, start = self._corpus.validation, 0
        if self._corpus.is_bytes:
            nearby = held_out[: max(len(held_out) - num_tokens, 0)][:_PROMPT_SEARCH_BYTES]
            line = re.search(rb"(?<=\n)[A-Za-z]", nearby.tobytes())
            start = line.start() if line else 0
        tokens = held_out[start : start + num_tokens].astype(np.int64)
        return torch.from_numpy(tokens)[None].to(self._device)

    def _cut(self, tokens: TokenArray, starts: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(tokens[starts[:, None] + self._window].astype(np.int64))
        if self._device.type == "cuda":
            # A copy from pinned memory does not make the host wait.
            windows = windows.pin_memory().to(self._device, non_blocking=True)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
