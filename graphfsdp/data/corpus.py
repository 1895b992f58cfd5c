"""What is trained on: Python's own standard library, text files, or a token file.

Token files are mapped and never read as a whole:

- ``X.bin``: little-endian uint16, nothing else, as nanoGPT writes it;
- ``X.npy``: a one-dimensional array of integers, as ``numpy.save`` writes it.
"""

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphfsdp.errors import ConfigError

TokenArray = npt.NDArray[Any]  # of integers

BYTES_VOCAB_SIZE = 256
_SKIPPED_IN_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# As git decides: a file with a zero byte near its start is not text.
_LOOKED_AT_BYTES = 8000


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
