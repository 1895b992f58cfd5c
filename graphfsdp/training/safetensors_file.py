"""Writes a model's parameters and buffers as a safetensors file, without a dependency."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

# Source: safetensors' format description; only what a model of ours can have.
_DTYPE_NAMES = (
    (torch.float64, "F64"),
    (torch.float32, "F32"),
    (torch.float16, "F16"),
    (torch.bfloat16, "BF16"),
    (torch.int64, "I64"),
    (torch.int32, "I32"),
    (torch.int16, "I16"),
    (torch.int8, "I8"),
    (torch.uint8, "U8"),
    (torch.bool, "BOOL"),
)
_ALIGNMENT_BYTES = 8


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
    """Write named tensors and free text.

    Source: https://huggingface.co/docs/safetensors: the header's size as 8 bytes, little
        endian; a JSON header padded with spaces; then the tensors' bytes without gaps.
    """
    names = dict(_DTYPE_NAMES)
    # Widest elements first, so that each tensor lies at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": names[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
    os.replace(unfinished, path)


__all__ = ["write_model", "write_state", "write_tensors"]
