"""Files of tokens, mapped and never read as a whole.

- ``X.bin``: little-endian uint16, nothing else, as nanoGPT writes it;
- ``X.npy``: a one-dimensional array of integers, as ``numpy.save`` writes it;
- ``X.bin`` beside ``X.idx``: Megatron's indexed data set. Source: Megatron-LM,
  megatron/core/datasets/indexed_dataset.py, ``_IndexWriter``.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphfsdp.errors import ConfigError

TokenArray = npt.NDArray[Any]  # of integers

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, number of sequences, of documents
_DTYPES = (None, "u1", "i1", "<i2", "<i4", "<i8", None, None, "<u2")  # by Megatron's codes


@dataclass(frozen=True)
class TokenFile:
    tokens: TokenArray
    document_starts: npt.NDArray[np.int64] | None  # ascending, None if the file does not say


def is_token_file(path: Path) -> bool:
    return path.suffix in (".bin", ".npy") or _index_of(path).exists()


def open_token_file(path: Path) -> TokenFile:
    """OSError if it cannot be read, ConfigError if it holds something else."""
    index = _index_of(path)
    if path.suffix != ".npy" and index.exists():
        return _open_megatron(index)
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r")
        except ValueError as error:
            raise ConfigError(
                f"--data {path}: is no .npy file that can be mapped ({error})"
            ) from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
            raise ConfigError(
                f"--data {path}: holds {tokens.dtype} of shape {tokens.shape}; expected tokens as "
                "integers in one dimension. Write it with numpy.save(path, tokens.ravel())"
            )
        return TokenFile(tokens, None)
    size_bytes = path.stat().st_size
    if size_bytes == 0 or size_bytes % 2:
        raise ConfigError(
            f"--data {path}: a .bin file holds 2 bytes (uint16) per token, this one has "
            f"{size_bytes} bytes; write it with numpy.ndarray.astype('<u2').tofile(...)"
        )
    return TokenFile(np.memmap(path, dtype="<u2", mode="r"), None)


def _index_of(path: Path) -> Path:
    """Megatron's paths have no ending: X for X.bin and X.idx."""
    return path.with_suffix(".idx") if path.suffix == ".bin" else path.with_name(f"{path.name}.idx")


def _open_megatron(index: Path) -> TokenFile:
    raw = np.memmap(index, mode="r")
    header = raw[: _HEADER.size].tobytes()
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ConfigError(
            f"--data {index}: is no index of Megatron's; it begins with {header[:9]!r}"
        )
    _, version, code, num_sequences, num_documents = _HEADER.unpack(header)
    dtype = _DTYPES[code] if code < len(_DTYPES) else None
    end = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if version != 1 or dtype is None or len(raw) < end:
        raise ConfigError(
            f"--data {index}: has version {version}, dtype code {code} and {len(raw)} bytes; "
            f"expected version 1, integers, and at least {end} bytes"
        )
    lengths = np.frombuffer(raw, "<i4", num_sequences, _HEADER.size)
    # A document is one or several sequences, its number that of its first one; the last is an end.
    documents = np.frombuffer(raw, "<i8", num_documents, end - 8 * num_documents)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.memmap(index.with_suffix(".bin"), dtype=dtype, mode="r")
    if len(tokens) != ends[-1]:
        raise ConfigError(
            f"--data {index}: counts {ends[-1]} tokens, {index.with_suffix('.bin').name} has "
            f"{len(tokens)}; the two belong to different data, or writing them did not end"
        )
    return TokenFile(tokens, np.unique(ends[documents]))
