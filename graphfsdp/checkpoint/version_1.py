"""Reads checkpoints of version 0.1, whose pieces have a CRC-32 for every 4 MiB.

Kept for the release after 0.1; a load and a save make a checkpoint of today.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.base.torch_internals import part_and_offset
from graphfsdp.checkpoint.manifest import Manifest, SavedFile, SavedTensor
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import MODEL, OPTIMIZER
from graphfsdp.checkpoint.values import dtype_of

_BLOCK_BYTES = 1 << 22


class _Block(NamedTuple):
    """What has a checksum of its own in a file."""

    start: int
    num_bytes: int
    crc32: int


class _Piece(NamedTuple):
    """One box of a tensor, in one file."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    start: int


@dataclass
class _Manifest(Manifest):
    pieces: dict[str, list[_Piece]] = field(default_factory=dict)
    blocks: dict[str, list[_Block]] = field(default_factory=dict)

    def is_whole(self, path: Path) -> bool:
        with path.open("rb") as file:
            for start, num_bytes, crc32 in self.blocks[path.name]:
                file.seek(start)
                if zlib.crc32(file.read(num_bytes)) != crc32:
                    return False
        return True

    def read(self, folder: Path, parts: Mapping[str, Sequence[Tensor]], members: Members) -> None:
        """Copy out of mapped files what each piece has of each part."""
        for key, (dtype, shape) in self.tensors.items():
            for into in parts.get(key, ()):
                place: Any = into
                starts = (0,) * len(shape)
                if is_dtensor(into):
                    _, starts = part_and_offset(shape, place.device_mesh, place.placements)
                for piece in self.pieces[key]:
                    _copy(folder, piece, dtype, local_part(into), starts)


def _copy(
    folder: Path, piece: _Piece, dtype: torch.dtype, into: Tensor, starts: Sequence[int]
) -> None:
    """Copy what a piece has of a tensor's part that begins at ``starts``."""
    path, sizes = folder / piece.file, torch.Size(piece.sizes)
    content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    flat = content.narrow(0, piece.start, sizes.numel() * dtype.itemsize)
    if piece.start % dtype.itemsize:
        flat = flat.clone()
    saved = flat.view(dtype).view(sizes)
    for axis, (mine, theirs) in enumerate(zip(starts, piece.offsets, strict=True)):
        first = max(mine, theirs)
        length = min(mine + into.shape[axis], theirs + saved.shape[axis]) - first
        if length <= 0:
            return
        into = into.narrow(axis, first - mine, length)
        saved = saved.narrow(axis, first - theirs, length)
    into.copy_(saved)


def read_body(body: dict[str, Any]) -> Manifest:
    facts = json.loads(json.dumps(body["facts"]), object_hook=_with_new_key)
    found = _Manifest(facts)
    for name, (num_bytes, head, crc32) in body["files"].items():
        found.files[name] = SavedFile(num_bytes, "")
        found.blocks[name] = [_Block(0, head, crc32)]
    for old_key, entry in body["tensors"].items():
        key, dtype = _new_key(old_key), dtype_of(entry["dtype"])
        found.tensors[key] = SavedTensor(dtype, tuple(entry["shape"]))
        found.pieces[key] = []
        for offsets, sizes, file, start, checksums in entry["pieces"]:
            found.pieces[key].append(_Piece(offsets, sizes, file, start))
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
