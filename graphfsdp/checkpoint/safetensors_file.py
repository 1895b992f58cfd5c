"""The safetensors format: names, shapes and raw bytes, nothing to run.

Written by hand: the package ``safetensors`` neither syncs nor lets bytes be checked as they go by,
and a checkpoint must not need it. Files of others are read by the package.

Source: https://huggingface.co/docs/safetensors: the header's size as 8 bytes, little endian; a
JSON header, padded with spaces; then the tensors' bytes without gaps.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from graphfsdp.errors import CheckpointDamagedError, CheckpointError

_DTYPE_NAMES = (
    (torch.float64, "F64"),
    (torch.float32, "F32"),
    (torch.float16, "F16"),
    (torch.bfloat16, "BF16"),
    (torch.float8_e4m3fn, "F8_E4M3"),
    (torch.float8_e5m2, "F8_E5M2"),
    (torch.complex64, "C64"),
    (torch.uint64, "U64"),
    (torch.int64, "I64"),
    (torch.uint32, "U32"),
    (torch.int32, "I32"),
    (torch.uint16, "U16"),
    (torch.int16, "I16"),
    (torch.int8, "I8"),
    (torch.uint8, "U8"),
    (torch.bool, "BOOL"),
)
_ALIGNMENT_BYTES = 8
_LENGTH_BYTES = 8


def order_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names, widest elements first, so that each lies at a multiple of its size."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def make_header(
    tensors: Mapping[str, Tensor], order: Sequence[str], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the first tensor, and where each tensor starts in the file."""
    names = dict(_DTYPE_NAMES)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in names:
            raise CheckpointError(
                f"{name!r} has the dtype {tensor.dtype}, which a safetensors file cannot hold. "
                f"Remedy: cast or view it as one of {', '.join(names.values())}"
            )
        starts[name], end = end, end + tensor.nbytes
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    begin = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return begin, {name: len(begin) + start for name, start in starts.items()}


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's elements in order as bytes; of a contiguous CPU tensor, its own memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def once_each(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tied tensors under the first of their names alone, and that by their other names."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}  # by identity
    for name, tensor in state.items():
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            aliases[name] = first
    return tensors, aliases


def write_state(path: Path, state: Mapping[str, Tensor]) -> None:
    """Tied tensors are written under the first of their names.

    The others stand in the file's metadata, where ``safetensors.torch.load_model`` looks for them.
    The file appears under its name only when it is complete.
    """
    tensors, aliases = once_each(state)
    order = order_of(tensors)
    begin, _ = make_header(tensors, order, {"format": "pt", **aliases})
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        file.write(begin)
        for name in order:
            file.write(raw_bytes(tensors[name]))
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, mapped; tied ones under each of their names."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError(
            f"{path} is read through the package safetensors, which is not installed. Remedy: "
            'pip install "graphfsdp[safetensors]"'
        ) from None
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            aliases = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointDamagedError(
            f"{path} is no safetensors file, or was cut off or damaged: {error}"
        ) from error
    return found | {alias: found[name] for alias, name in aliases.items() if name in found}


def map_file(path: Path) -> Tensor:
    """Return a file's bytes, [bytes] uint8, mapped: read when they are looked at."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def view_bytes(content: Tensor, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    """Return one tensor of a mapped file, without a copy where its bytes are aligned."""
    flat = content.narrow(0, start, torch.Size(shape).numel() * dtype.itemsize)
    if start % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)
