"""The safetensors format, without a dependency: names, shapes and raw bytes, nothing to run.

Source: https://huggingface.co/docs/safetensors: the header's size as 8 bytes, little endian; a
JSON header, padded with spaces; then the tensors' bytes without gaps.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

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
# As the reference implementation; a damaged length must not make us read gigabytes.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorSpec:
    """What a file says of one tensor.

    Attributes:
        dtype: Element type.
        shape: Its shape.
        start: First byte, from the start of the file.
        num_bytes: How many there are.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def order_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names, widest elements first, so that each lies at a multiple of its size."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def make_header(
    tensors: Mapping[str, Tensor], order: Sequence[str], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the first tensor, and where each tensor starts in the file.

    Args:
        tensors: Only their dtypes and shapes are looked at.
        order: In which they will follow, as from ``order_of``.
        metadata: Free text.

    Raises:
        CheckpointError: the format has no name for a dtype.
    """
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


def write_model(path: Path, model: nn.Module) -> None:
    """Write every parameter and persistent buffer of a model, as ``write_state`` does."""
    write_state(path, model.state_dict(keep_vars=True))  # with keep_vars it makes no copies


def write_state(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write the tensors of a model.

    A tensor that has several names, such as tied embeddings, is written under the first; the
    others stand in the file's metadata, where ``safetensors.torch.load_model`` looks for them.
    The file appears under its name only when it is complete.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}  # by identity
    for name, tensor in state.items():
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            aliases[name] = first
    write_tensors(path, tensors, metadata={"format": "pt", **aliases})


def write_tensors(path: Path, tensors: dict[str, Tensor], *, metadata: dict[str, str]) -> None:
    """Write named tensors and free text; the file appears under its name when it is complete."""
    order = order_of(tensors)
    begin, _ = make_header(tensors, order, metadata)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        file.write(begin)
        for name in order:
            file.write(raw_bytes(tensors[name]))
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read_header(path: Path) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return what a file holds, and its free text.

    Raises:
        CheckpointDamagedError: it is no safetensors file, or a part is missing.
    """
    dtypes = {name: dtype for dtype, name in _DTYPE_NAMES}
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise CheckpointDamagedError(f"{path} is no safetensors file, or was cut off")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
        specs = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            specs[name] = TensorSpec(
                dtypes[entry["dtype"]],
                tuple(int(size) for size in entry["shape"]),
                _LENGTH_BYTES + length + int(start),
                int(end) - int(start),
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(f"{path} has a header that is damaged: {error!r}") from error
    for name, spec in specs.items():
        numel = torch.Size(spec.shape).numel()
        if spec.num_bytes != numel * spec.dtype.itemsize or spec.start + spec.num_bytes > size:
            raise CheckpointDamagedError(
                f"{path} says that {name!r} of shape {list(spec.shape)} has {spec.num_bytes} bytes "
                f"from {spec.start} on, which does not fit to its shape or to the file's {size}"
            )
    return specs, metadata


def map_file(path: Path) -> Tensor:
    """Return a file's bytes, [bytes] uint8, mapped: read when they are looked at."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def view_bytes(content: Tensor, spec: TensorSpec) -> Tensor:
    """Return one tensor of a mapped file, without a copy where its bytes are aligned."""
    flat = content.narrow(0, spec.start, spec.num_bytes)
    if spec.start % spec.dtype.itemsize:
        flat = flat.clone()
    return flat.view(spec.dtype).view(spec.shape)
