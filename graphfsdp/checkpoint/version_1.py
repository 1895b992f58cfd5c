"""Reads checkpoints of version 0.1, whose pieces have a CRC-32 for every 4 MiB.

Kept for the release after 0.1; a load and a save make a checkpoint of today.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.base.torch_internals import part_and_offset
from graphfsdp.checkpoint.file_format import safetensors
from graphfsdp.checkpoint.manifest import Manifest, SavedFile, SavedTensor
from graphfsdp.checkpoint.named import MODEL, OPTIMIZER
from graphfsdp.checkpoint.values import dtype_of

_BLOCK_BYTES = 1 << 22
_PIECE = re.compile(r"(.*?)(?:\[(\d+:\d+(?:,\d+:\d+)*)\])?")


class _Block(NamedTuple):
    """What has a checksum of its own in a file."""

    start: int
    num_bytes: int
    crc32: int


@dataclass
class _Manifest(Manifest):
    blocks: dict[str, list[_Block]] = field(default_factory=dict)

    def is_whole(self, path: Path) -> bool:
        with path.open("rb") as file:
            for start, num_bytes, crc32 in self.blocks[path.name]:
                file.seek(start)
                if zlib.crc32(file.read(num_bytes)) != crc32:
                    return False
        return True

    def read(self, folder: Path, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Copy what each piece, a box of a tensor, has of each part."""
        for name in (name for name in self.files if name.endswith(".safetensors")):
            opened = safetensors().safe_open(folder / name, framework="pt")
            with opened as file, torch.device("cpu"):  # where slices come, too
                for piece in file.keys():  # noqa: SIM118
                    old_key, *box = _PIECE.fullmatch(piece).groups()  # type: ignore[union-attr]
                    for part in parts.get(_new_key(old_key), ()):
                        _copy(file.get_slice(piece), box[0], part)


def _copy(saved: Any, box: str | None, part: Tensor) -> None:
    """Copy what a piece has of this rank's part of a tensor; without a box it is the whole."""
    place: Any = part
    mine, into = (0,) * part.dim(), local_part(part)
    if is_dtensor(part):
        _, mine = part_and_offset(part.shape, place.device_mesh, place.placements)
    theirs = [int(edges.split(":")[0]) for edges in box.split(",")] if box else (0,) * part.dim()
    wanted = []
    for axis, (here, there, size) in enumerate(zip(mine, theirs, saved.get_shape(), strict=True)):
        first, end = max(here, there), min(here + into.shape[axis], there + size)
        if first >= end:
            return
        into = into.narrow(axis, first - here, end - first)
        wanted.append(slice(first - there, end - there))
    into.copy_(saved[tuple(wanted)])


def read_body(body: dict[str, Any]) -> Manifest:
    found = _Manifest(json.loads(json.dumps(body["facts"]), object_hook=_with_new_key))
    for name, (num_bytes, head, crc32) in body["files"].items():
        found.files[name] = SavedFile(num_bytes, "")
        found.blocks[name] = [_Block(0, head, crc32)]
    for old_key, entry in body["tensors"].items():
        dtype = dtype_of(entry["dtype"])
        found.tensors[_new_key(old_key)] = SavedTensor(dtype, tuple(entry["shape"]))
        for _, sizes, file, start, checksums in entry["pieces"]:
            num_bytes = torch.Size(sizes).numel() * dtype.itemsize
            for crc32, first in zip(checksums, range(0, num_bytes, _BLOCK_BYTES), strict=True):
                length = min(_BLOCK_BYTES, num_bytes - first)
                found.blocks[file].append(_Block(start + first, length, crc32))
    return found


def _new_key(key: str) -> str:
    """Return today's key of a tensor; ``model/NAME`` was that of what is ``model.NAME`` now."""
    if key.startswith("model/"):
        return MODEL + key.removeprefix("model/")
    name, between, entry = key.removeprefix("optimizer/").rpartition("/")
    if key.startswith("optimizer/") and between:
        return f"{OPTIMIZER}{name}.{entry}"
    return key


def _with_new_key(value: dict[str, Any]) -> dict[str, Any]:
    is_stored = value.get("!") == "tensor" and "key" in value
    return {**value, "key": _new_key(value["key"])} if is_stored else value
