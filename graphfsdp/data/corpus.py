"""What is trained on: Python's own standard library, text files, or a token file.

Token files are mapped and never read as a whole:

- ``X.bin``: little-endian uint16, nothing else, as nanoGPT writes it;
- ``X.npy``: a one-dimensional array of integers, as ``numpy.save`` writes it.
"""

import dataclasses
import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphfsdp.errors import ConfigError

TokenArray = npt.NDArray[Any]  # of integers

# The last part of the corpus, never trained on.
_HELD_OUT_PERCENT = 5.0
BYTES_VOCAB_SIZE = 256
# Counting tokens converts them to 64-bit integers, so large files are counted in pieces; of huge
# ones so many pieces are counted, at even distances.
_PIECE_NUMEL = 1 << 22
_MAX_PIECES = 64
_MAX_VOCAB_SIZE = 1 << 24
_SKIPPED_IN_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# As git decides: a file with a zero byte near its start is not text.
_LOOKED_AT_BYTES = 8000


@dataclass(frozen=True)
class Corpus:
    """Tokens, cut into what is trained on and what is held out, and what is known of them."""

    name: str  # for the banner
    train: TokenArray
    validation: TokenArray  # what follows, never trained on
    vocab_size: int  # smallest that holds every token that was counted
    # Nats per token, tokens taken alone: the loss of the best model that looks at no context.
    unigram_entropy: float
    document_starts: npt.NDArray[np.int64] | None = None  # ascending, None if nobody has said
    is_counted: bool = True  # every token of it; of huge files only some are


def load_corpus(path: str | None, *, held_out_percent: float = _HELD_OUT_PERCENT) -> Corpus:
    """Read a text file, a directory of text files, or a file of tokens.

    None is the standard library's source files.
    """
    if path is None:
        return _standard_library(held_out_percent)
    where = Path(path)
    try:
        if where.is_dir():
            texts = [text for file in _walk(where) if _is_text(text := file.read_bytes())]
            if not texts:
                raise ConfigError(
                    f"--data {path}: the directory holds no text file; give another directory, "
                    f"or one file by its name"
                )
            return _from_texts(f"{path} ({len(texts)} files)", texts, held_out_percent)
        if is_token_file(where):
            return _split(path, _open_token_file(where), held_out_percent)
        return _from_texts(path, [where.read_bytes()], held_out_percent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"--data {path}: cannot be read ({reason}); give a text file, a directory of text "
            f"files, a .bin file of uint16 tokens, or a .npy file of integers"
        ) from None


def _standard_library(held_out_percent: float) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, _SKIPPED_IN_LIBRARY) if file.suffix == ".py"]
    if not files:
        raise ConfigError(
            "--data: this Python carries no source files of its standard library to train on; "
            "give a text file with --data PATH"
        )
    version = sysconfig.get_python_version()
    name = f"Python {version} standard library ({len(files)} files)"
    return _from_texts(name, [file.read_bytes() for file in files], held_out_percent)


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


def _from_texts(name: str, texts: Sequence[bytes], held_out_percent: float) -> Corpus:
    """Join the texts, each a document, by an end of line."""
    joined = b"\n".join(texts)
    if not joined:
        raise ConfigError(f"--data {name}: holds no text; give a file that does")
    starts = None
    if len(texts) > 1:
        lengths = np.array([0, *(len(text) + 1 for text in texts[:-1])])
        starts = np.cumsum(lengths, dtype=np.int64)
    tokens = np.frombuffer(joined, dtype=np.uint8)
    corpus = _split(name, tokens, held_out_percent, is_bytes=True)
    return dataclasses.replace(corpus, document_starts=starts)


def _split(
    name: str, tokens: TokenArray, held_out_percent: float, *, is_bytes: bool = False
) -> Corpus:
    pieces = range(0, len(tokens), _PIECE_NUMEL)
    counted = pieces[:: math.ceil(len(pieces) / _MAX_PIECES)]
    counts = np.zeros(BYTES_VOCAB_SIZE, dtype=np.int64)
    for start in counted:
        piece = tokens[start : start + _PIECE_NUMEL]
        lowest, highest = int(piece.min()), int(piece.max())
        if not 0 <= lowest <= highest < _MAX_VOCAB_SIZE:
            raise ConfigError(
                f"--data {name}: has numbers from {lowest} to {highest}; expected tokens in "
                f"0..{_MAX_VOCAB_SIZE - 1}. Remedy: look at the dtype that the file was written in"
            )
        found = np.bincount(piece, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    seen = counts[counts > 0] / counts.sum()
    border = len(tokens) - math.ceil(held_out_percent / 100 * len(tokens))
    return Corpus(
        name=name,
        train=tokens[:border],
        validation=tokens[border:],
        vocab_size=BYTES_VOCAB_SIZE if is_bytes else int(counts.nonzero()[0][-1]) + 1,
        unigram_entropy=float(0.0 - (seen * np.log(seen)).sum()),
        is_counted=len(counted) == len(pieces),
    )
