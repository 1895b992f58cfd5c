"""Reads pieces of a checkpoint, for torch.distributed.checkpoint; first it checks all of them."""

import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from graphfsdp.checkpoint.manifest import BLOCK_BYTES, Manifest, SavedPiece
from graphfsdp.checkpoint.safetensors_file import TensorSpec, map_file, view_bytes
from graphfsdp.checkpoint.values import Json
from graphfsdp.errors import CheckpointDamagedError

_MAX_NAMED = 20


class CheckpointFiles:
    """The files of a checkpoint, mapped when they are first looked at, and their checksums."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Look at nothing yet."""
        self._folder = folder
        self._manifest = manifest
        self._mapped: dict[str, Tensor | None] = {}
        self.damage: list[str] = []

    def content(self, name: str) -> Tensor | None:
        """Return a file's bytes, [bytes] uint8; None where it is damaged, which is noted."""
        if name not in self._mapped:
            self._mapped[name] = self._open(name)
        return self._mapped[name]

    def _open(self, name: str) -> Tensor | None:
        expected, path = self._manifest.files[name], self._folder / name
        try:
            size = path.stat().st_size
            if size != expected.num_bytes:
                self.damage.append(f"{name} has {size} bytes, expected {expected.num_bytes}")
                return None
            content = map_file(path)
        except OSError as error:
            self.damage.append(f"{name} cannot be read ({error.strerror or error})")
            return None
        except RuntimeError as error:  # torch's word for a file that it cannot map
            self.damage.append(f"{name} cannot be read ({str(error).splitlines()[0]})")
            return None
        if zlib.crc32(content[: expected.head_bytes].numpy().data) != expected.head_crc32:
            self.damage.append(f"{name}: the checksum of its first bytes differs")
            return None
        return content

    def check(self, key: str, piece: SavedPiece, begin: int, end: int) -> None:
        """Compare the checksums of the bytes [begin, end) of a piece; note what differs."""
        content = self.content(piece.file)
        if content is None:
            return
        num_bytes = _num_bytes(self._manifest, key, piece)
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            first = block * BLOCK_BYTES
            last = min(first + BLOCK_BYTES, num_bytes)
            start = piece.start + first
            found = content[start : piece.start + last].numpy().data
            if zlib.crc32(found) != piece.crc32[block]:
                self.damage.append(
                    f"{key} is damaged in bytes [{start}, {piece.start + last}) of {piece.file}: "
                    "the checksum differs"
                )

    def tensor(self, key: str, piece: SavedPiece) -> Tensor:
        """Return a piece that was checked, as a view of the mapped file."""
        content = self.content(piece.file)
        assert content is not None
        dtype = self._manifest.tensors[key].dtype
        num_bytes = _num_bytes(self._manifest, key, piece)
        return view_bytes(content, TensorSpec(dtype, piece.sizes, piece.start, num_bytes))

    def objects(self, name: str) -> dict[str, Json]:
        """Return the encoded states of a rank's objects.

        Raises:
            CheckpointDamagedError: the file is not what was written.
        """
        content = self.content(name)
        self.raise_damage()
        assert content is not None
        found: dict[str, Json] = json.loads(content.numpy().tobytes())
        return found

    def raise_damage(self) -> None:
        """Complain of all that was noted.

        Raises:
            CheckpointDamagedError: something was.
        """
        if not self.damage:
            return
        named = "\n".join(f"  {line}" for line in self.damage[:_MAX_NAMED])
        more = len(self.damage) - _MAX_NAMED
        raise CheckpointDamagedError(
            f"the checkpoint {self._folder} is damaged; nothing was loaded:\n{named}"
            + (f"\n  and {more} more" if more > 0 else "")
            + "\nRemedy: load an earlier one (step=...), or copy this one anew"
        )


class FolderReader(StorageReader):
    """Reads what a plan asks for; every rank has checked all that it needs before any is read."""

    def __init__(self, files: CheckpointFiles, manifest: Manifest) -> None:
        """Read from these files."""
        self._files = files
        self._manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what was saved, in torch's words."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=saved.dtype),
                    torch.Size(saved.shape),
                    [
                        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                        for piece in saved.pieces
                    ],
                )
                for key, saved in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the manifest was read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check every byte that this rank will read.

        Raises:
            CheckpointDamagedError: some are not what was saved; then no rank reads.
        """
        for key, piece, items in self._by_piece(plan):
            ranges = [_byte_range(piece, item, self._itemsize(key)) for item in items]
            self._files.check(
                key, piece, min(begin for begin, _ in ranges), max(end for _, end in ranges)
            )
        self._files.raise_damage()
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for into its places, converting dtypes."""
        with torch.no_grad():
            for key, piece, items in self._by_piece(plan):
                saved = self._files.tensor(key, piece)
                for item in items:
                    source = saved
                    ranges = zip(item.storage_offsets, item.lengths, strict=True)
                    for dim, (start, length) in enumerate(ranges):
                        source = source.narrow(dim, start, length)
                    planner.resolve_tensor(item).copy_(source)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _by_piece(self, plan: LoadPlan) -> Iterator[tuple[str, SavedPiece, list[ReadItem]]]:
        """Yield each piece that is read from with what is read, in the order of the files."""
        found: dict[tuple[str, int, str], tuple[str, SavedPiece, list[ReadItem]]] = {}
        for item in plan.items:
            key, number = item.storage_index.fqn, item.storage_index.index
            assert number is not None
            piece = self._manifest.tensors[key].pieces[number]
            found.setdefault((piece.file, piece.start, key), (key, piece, []))[2].append(item)
        for place in sorted(found):
            yield found[place]

    def _itemsize(self, key: str) -> int:
        return self._manifest.tensors[key].dtype.itemsize

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path could be meant for this reader: any could."""
        return True


def check_everything(files: CheckpointFiles, manifest: Manifest) -> None:
    """Compare every checksum.

    Raises:
        CheckpointDamagedError: something is not what was saved.
    """
    for name in manifest.files:
        files.content(name)
    for key, saved in manifest.tensors.items():
        for piece in saved.pieces:
            files.check(key, piece, 0, _num_bytes(manifest, key, piece))
    files.raise_damage()


def _num_bytes(manifest: Manifest, key: str, piece: SavedPiece) -> int:
    return math.prod(piece.sizes) * manifest.tensors[key].dtype.itemsize


def _byte_range(piece: SavedPiece, item: ReadItem, itemsize: int) -> tuple[int, int]:
    """Return the first byte and the end of what an item reads of a piece."""
    first = last = 0
    ranges = zip(piece.sizes, item.storage_offsets, item.lengths, strict=True)
    for size, start, length in ranges:
        first = first * size + start
        last = last * size + start + length - 1
    return first * itemsize, (last + 1) * itemsize
