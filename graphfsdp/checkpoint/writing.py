"""Writes a checkpoint's files: of each rank its tensors as safetensors, its objects as JSON.

By hand, since torch.distributed.checkpoint does not keep the promises: its planner takes rows to
be cut evenly, its ``FileSystemWriter`` pickles the metadata, and neither has checksums, without
which damage would be loaded. What would be left of it is less than what connects to it.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from graphfsdp.checkpoint.folder import explained
from graphfsdp.checkpoint.manifest import BLOCK_BYTES, SavedFile, SavedPiece, SavedTensor
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.parts import NamedPart
from graphfsdp.checkpoint.safetensors_file import make_header, order_of, raw_bytes
from graphfsdp.checkpoint.values import Json
from graphfsdp.errors import CheckpointError

# The disk begins so early: less would be many small requests, more would leave it idle at first.
_SYNC_BYTES = 16 << 20

Finish = Callable[[dict[str, SavedFile], dict[str, SavedTensor]], None]


@dataclass(frozen=True)
class _Box:
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    whole_shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class _Written:
    """The files of a rank, and where each of its boxes lies in them."""

    files: dict[str, SavedFile]
    pieces: list[tuple[_Box, SavedPiece]]


def objects_file(rank: int) -> str:
    return f"objects-{rank:05d}.json"


def write_files(
    folder: Path,
    parts: Sequence[NamedPart],
    objects: dict[str, Json],
    members: Members,
    finish: Finish,
) -> None:
    """Write and sync every rank's files; then rank 0 calls ``finish`` with all that was written."""
    filled = [(key, part) for key, part in parts if part.local.numel() or 0 in part.whole_shape]
    boxes = [
        _Box(key, tuple(part.offsets), tuple(part.local.shape), part.dtype, part.whole_shape)
        for key, part in filled
    ]
    chosen = members.assign(boxes, _share_out)
    tensors = {boxes[number]: filled[number][1].local for number in chosen}

    def write() -> _Written:
        with explained(folder.parent):
            return _write(folder, members.rank, tensors, objects)

    def list_all(everyone: list[_Written]) -> list[None]:
        files = {name: file for written in everyone for name, file in written.files.items()}
        _check_files(folder, files)
        pieces: dict[_Box, list[SavedPiece]] = {}
        for box, piece in (pair for written in everyone for pair in written.pieces):
            whole = _Box(box.key, (), (), box.dtype, box.whole_shape)
            pieces.setdefault(whole, []).append(piece)
        finish(
            files,
            {w.key: SavedTensor(w.dtype, w.whole_shape, tuple(p)) for w, p in pieces.items()},
        )
        return [None for _ in everyone]

    members.assign(members.together(write), list_all)


def _share_out(offers: list[list[_Box]]) -> list[list[int]]:
    """Return the numbers of the boxes that each rank writes: each once, where least is written."""
    holders: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, boxes in enumerate(offers):
        for number, box in enumerate(boxes):
            holders.setdefault((box.key, box.offsets), {}).setdefault(rank, number)
    chosen: list[list[int]] = [[] for _ in offers]
    num_bytes = [0 for _ in offers]
    missing: dict[str, int] = {}
    for places in sorted(holders.values(), key=len):  # first those of which nobody has a copy
        rank = min(places, key=lambda rank: num_bytes[rank])
        box = offers[rank][places[rank]]
        chosen[rank].append(places[rank])
        num_bytes[rank] += box.num_bytes
        whole = missing.setdefault(box.key, math.prod(box.whole_shape))
        missing[box.key] = whole - math.prod(box.sizes)
    wrong = sorted(key for key, numel in missing.items() if numel)
    if wrong:
        raise CheckpointError(
            f"the parts of {wrong[0]!r} that the ranks have do not make up the whole: "
            f"{missing[wrong[0]]} elements are missing. Remedy: save on all ranks that share the "
            "model"
        )
    return chosen


def _write(
    folder: Path, rank: int, tensors: Mapping[_Box, Tensor], objects: dict[str, Json]
) -> _Written:
    written = _Written({}, [])
    if tensors:
        named = {_name_of(box): tensor for box, tensor in tensors.items()}
        order = order_of(named)
        begin, starts = make_header(named, order, {"format": "pt"})
        name = f"data-{rank:05d}.safetensors"
        with (folder / name).open("xb") as file:
            file.write(begin)
            checksums = _write_tensors(file, [named[name] for name in order])
            size = file.tell()
        written.files[name] = SavedFile(size, len(begin), zlib.crc32(begin))
        crc32 = dict(zip(order, checksums, strict=True))
        for box in tensors:
            place = (name, starts[_name_of(box)], crc32[_name_of(box)])
            written.pieces.append((box, SavedPiece(box.offsets, box.sizes, *place)))
    content = json.dumps(objects, allow_nan=False).encode()
    with (folder / objects_file(rank)).open("xb") as file:
        file.write(content)
        _sync(file)
    written.files[objects_file(rank)] = SavedFile(len(content), len(content), zlib.crc32(content))
    return written


def _write_tensors(file: BinaryIO, tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the checksums of the tensors' blocks; the disk begins while they are written.

    Left alone, the system keeps what is written in memory, and the one sync at the end waits.
    """
    found = []
    num_new_bytes = 0
    running: Future[None] | None = None
    with ThreadPoolExecutor(1, "graphfsdp-sync") as thread:
        for content in map(raw_bytes, tensors):
            crc32 = []
            for start in range(0, len(content), BLOCK_BYTES):
                block = content[start : start + BLOCK_BYTES]
                crc32.append(zlib.crc32(block))
                file.write(block)
                num_new_bytes += len(block)
                is_idle = running is None or running.done()
                if num_new_bytes >= _SYNC_BYTES and is_idle and hasattr(os, "fdatasync"):
                    if running is not None:
                        running.result()  # a failure is told to one sync only, so it counts here
                    num_new_bytes = 0
                    running = thread.submit(os.fdatasync, file.fileno())
            found.append(tuple(crc32))
        if running is not None:
            running.result()
    _sync(file)
    return found


def _name_of(box: _Box) -> str:
    """Return a box's name in the file; of a box that is not all, with its place."""
    if box.whole_shape == box.sizes:
        return box.key
    ranges = (f"{first}:{first + n}" for first, n in zip(box.offsets, box.sizes, strict=True))
    return f"{box.key}[{','.join(ranges)}]"


def _check_files(folder: Path, files: Mapping[str, SavedFile]) -> None:
    for name, file in files.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size != file.num_bytes:
            raise CheckpointError(
                f"{path} was written by its rank with {file.num_bytes} bytes, but rank 0 "
                f"sees {'no such file' if size is None else f'{size} bytes'}. Remedy: a "
                "folder on a file system that all machines share"
            )


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
