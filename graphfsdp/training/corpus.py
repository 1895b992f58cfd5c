"""Where the tokens come from: Python's own standard library, text files, or a token file."""

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out.

    Attributes:
        name: What it is, for the banner.
        train: The first 95 % of the tokens.
        validation: The last 5 %, never trained on.
        vocab_size: Smallest vocabulary that holds every token.
        unigram_entropy: Nats per token of the whole corpus, tokens taken alone: the loss of the
            best model that looks at no context.
        is_bytes: Tokens are bytes of text, so that a sample can be printed as text.
    """

    name: str
    train: TokenArray
    validation: TokenArray
    vocab_size: int
    unigram_entropy: float
    is_bytes: bool


def load_corpus(path: str | None) -> Corpus:
    """Read a corpus.

    Args:
        path: A text file, a directory of text files, a ``.bin`` file of little-endian uint16
            tokens (mapped, not read), or None for the standard library's source files.

    Raises:
        ConfigError: there is nothing readable at that path.
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
