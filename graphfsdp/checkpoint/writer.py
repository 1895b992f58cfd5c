"""Writes this rank's part of a checkpoint, for torch.distributed.checkpoint."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from graphfsdp.checkpoint.early_sync import EarlySync
from graphfsdp.checkpoint.manifest import (
    BLOCK_BYTES,
    Manifest,
    SavedFile,
    SavedPiece,
    SavedTensor,
)
from graphfsdp.checkpoint.safetensors_file import make_header, order_of, raw_bytes
from graphfsdp.checkpoint.values import Json
from graphfsdp.errors import CheckpointError

Commit = Callable[[Manifest], None]

# Stands for a file among the results of a rank, whose other entries are pieces of tensors.
_FILE = MetadataIndex("!file")


def data_file(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"data-{rank:05d}.safetensors"


def objects_file(rank: int) -> str:
    """Return the name of the file with the state of a rank's objects."""
    return f"objects-{rank:05d}.json"


class FolderWriter(StorageWriter):
    """Writes tensors as one safetensors file per rank, and the objects as JSON beside it."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        facts: dict[str, Json],
        objects: dict[str, Json],
        commit: Commit,
    ) -> None:
        """Prepare to write.

        Args:
            folder: Exists, and nobody else writes into it.
            rank: Of this process.
            facts: For the manifest; those of rank 0 count.
            objects: States of this rank's objects, encoded.
            commit: Called on rank 0 with the finished manifest when every rank has written.
        """
        self._folder = folder
        self._rank = rank
        self._facts = facts
        self._objects = objects
        self._commit = commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's files."""
        results = self._write_tensors(plan.items, planner)
        name = objects_file(self._rank)
        content = json.dumps(self._objects, allow_nan=False).encode()
        with (self._folder / name).open("xb") as file:
            file.write(content)
            _sync(file)
        whole = SavedFile(len(content), len(content), zlib.crc32(content))
        results.append(WriteResult(_FILE, len(content), (name, whole)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_tensors(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        tensors: dict[str, Tensor] = {}
        item_of: dict[str, WriteItem] = {}
        for item in items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            name = _name_of(item, tensor)
            tensors[name], item_of[name] = tensor, item
        if not tensors:
            return []
        results = []
        order = order_of(tensors)
        begin, starts = make_header(tensors, order, {"format": "pt"})
        file_name = data_file(self._rank)
        with (self._folder / file_name).open("xb") as file, EarlySync(file) as early:
            file.write(begin)
            for name in order:
                content = raw_bytes(tensors[name])
                crc32 = _write_blocks(file, content, early)
                place = (file_name, starts[name], crc32)
                results.append(WriteResult(item_of[name].index, len(content), place))
            early.finish()
            _sync(file)
            size = file.tell()
        head = SavedFile(size, len(begin), zlib.crc32(begin))
        return [*results, WriteResult(_FILE, len(begin), (file_name, head))]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """List what was written and make it visible; on rank 0, when all have written.

        Raises:
            CheckpointError: a file of another rank is not here.
        """
        files: dict[str, SavedFile] = {}
        places: dict[tuple[str, torch.Size | None], Any] = {}
        for result in (result for rank in results for result in rank):
            if result.index == _FILE:
                name, file = result.storage_data
                files[name] = file
            else:
                places[result.index.fqn, result.index.offset] = result.storage_data
        self._check_files(files)
        tensors: dict[str, SavedTensor] = {}
        for key, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)
            pieces = tuple(
                SavedPiece(tuple(chunk.offsets), tuple(chunk.sizes), *places[key, chunk.offsets])
                for chunk in saved.chunks
            )
            tensors[key] = SavedTensor(saved.properties.dtype, tuple(saved.size), pieces)
        self._commit(Manifest(self._facts, files, tensors))

    def _check_files(self, files: dict[str, SavedFile]) -> None:
        for name, file in files.items():
            path = self._folder / name
            size = path.stat().st_size if path.exists() else None
            if size != file.num_bytes:
                raise CheckpointError(
                    f"{path} was written by its rank with {file.num_bytes} bytes, but rank 0 "
                    f"sees {'no such file' if size is None else f'{size} bytes'}. Remedy: a "
                    "folder on a file system that all machines share"
                )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path could be meant for this writer: any could."""
        return True


def _name_of(item: WriteItem, tensor: Tensor) -> str:
    """Return a piece's name in the file; of a piece that is not all, with its place."""
    assert item.tensor_data is not None
    key, offsets = item.index.fqn, item.index.offset or ()
    if item.tensor_data.size == tensor.shape:
        return key
    ranges = (f"{start}:{start + n}" for start, n in zip(offsets, tensor.shape, strict=True))
    return f"{key}[{','.join(ranges)}]"


def _write_blocks(file: BinaryIO, content: memoryview, early: EarlySync) -> tuple[int, ...]:
    crc32 = []
    for start in range(0, len(content), BLOCK_BYTES):
        block = content[start : start + BLOCK_BYTES]
        crc32.append(zlib.crc32(block))
        file.write(block)
        early.wrote(len(block))
    return tuple(crc32)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
