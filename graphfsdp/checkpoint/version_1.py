"""Reads checkpoints of version 0.1, whose pieces have a CRC-32 for every 4 MiB.

Kept for the release after 0.1; a load and a save make a checkpoint of today.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from graphfsdp.checkpoint.manifest import Manifest, SavedFile, SavedTensor
from graphfsdp.checkpoint.named import MODEL, OPTIMIZER
from graphfsdp.checkpoint.values import dtype_of

_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class _File(SavedFile):
    blocks: list[tuple[int, int, int]]  # first byte, number of bytes, CRC-32

    def holds(self, file: BinaryIO) -> bool:
        for start, num_bytes, crc32 in self.blocks:
            file.seek(start)
            if zlib.crc32(file.read(num_bytes)) != crc32:
                return False
        return True


class _Piece(NamedTuple):
    """One box of a tensor, in one file."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    start: int


@dataclass
class _Manifest(Manifest):
    pieces: dict[str, list[_Piece]] = field(default_factory=dict)

    def reader(self, folder: Path) -> StorageReader:
        return _Reader(self, folder)


def read_body(body: dict[str, Any]) -> Manifest:
    facts = json.loads(json.dumps(body["facts"]), object_hook=_with_new_key)
    found = _Manifest(facts)
    blocks = {name: [(0, head, crc32)] for name, (_, head, crc32) in body["files"].items()}
    for old_key, entry in body["tensors"].items():
        key, dtype = _new_key(old_key), dtype_of(entry["dtype"])
        found.tensors[key] = SavedTensor(dtype, tuple(entry["shape"]))
        found.pieces[key] = []
        for offsets, sizes, file, start, checksums in entry["pieces"]:
            found.pieces[key].append(_Piece(offsets, sizes, file, start))
            num_bytes = torch.Size(sizes).numel() * dtype.itemsize
            for crc32, first in zip(checksums, range(0, num_bytes, _BLOCK_BYTES), strict=True):
                length = min(_BLOCK_BYTES, num_bytes - first)
                blocks[file].append((start + first, length, crc32))
    for name, (num_bytes, _, _) in body["files"].items():
        found.files[name] = _File(num_bytes, "", blocks[name])
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


class _Reader(StorageReader):
    """Copies pieces out of mapped files."""

    def __init__(self, manifest: _Manifest, folder: Path) -> None:
        self._manifest, self._folder = manifest, folder

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, Any] = {}
        for key, (dtype, shape) in self._manifest.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                for piece in self._manifest.pieces[key]
            ]
            properties = TensorProperties(dtype=dtype)
            found[key] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        return Metadata(found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the manifest is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = {
            MetadataIndex(key, piece.offsets): (dtype, piece)
            for key, (dtype, _) in self._manifest.tensors.items()
            for piece in self._manifest.pieces[key]
        }
        for item in plan.items:
            dtype, piece = places[item.storage_index]
            path, sizes = self._folder / piece.file, torch.Size(piece.sizes)
            num_bytes = path.stat().st_size
            content = torch.from_file(str(path), size=num_bytes, dtype=torch.uint8)
            flat = content.narrow(0, piece.start, sizes.numel() * dtype.itemsize)
            if piece.start % dtype.itemsize:
                flat = flat.clone()
            saved = flat.view(dtype).view(sizes)
            for axis, (first, n) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                saved = saved.narrow(axis, first, n)
            planner.resolve_tensor(item).copy_(saved)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
