"""Writes a checkpoint's files: of each rank its tensors as safetensors, its objects as JSON.

By hand, since torch.distributed.checkpoint does not keep the promises: its planner takes rows to
be cut evenly, its ``FileSystemWriter`` pickles the metadata, and neither has checksums, without
which damage would be loaded. What would be left of it is less than what connects to it.
"""

import hashlib
import json
import math
import os
import platform
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from graphfsdp.checkpoint.folder import commit, explained, give_up, unfinished
from graphfsdp.checkpoint.manifest import (
    BLOCK_BYTES,
    Manifest,
    SavedFile,
    SavedPiece,
    SavedTensor,
)
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import NamedPart, Part
from graphfsdp.checkpoint.safetensors_file import make_header, order_of, raw_bytes
from graphfsdp.checkpoint.values import Json
from graphfsdp.errors import CheckpointError

# The disk begins so early: less would be many small requests, more would leave it idle at first.
_SYNC_BYTES = 16 << 20

# The files that a rank has written, and the tensors in them with one piece each.
Written = tuple[dict[str, SavedFile], list[tuple[str, SavedTensor]]]


@dataclass(frozen=True)
class Snapshot:
    """All that one rank saves, at one moment."""

    parts: tuple[NamedPart, ...]
    facts: dict[str, Json]  # for the manifest
    objects: dict[str, Json]  # encoded states


def objects_file(rank: int) -> str:
    return f"objects-{rank:05d}.json"


def write_snapshot(
    snapshot: Snapshot,
    root: Path,
    name: str,
    step: int,
    members: Members,
    *,
    keep_last: int | None = None,
) -> Path:
    """Write, sync and show a checkpoint that was begun, or leave nothing of it; a collective."""
    folder = unfinished(root, name)
    facts = {
        "step": step,
        "num_ranks": members.size,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "objects": members.gather({key: _digest(state) for key, state in snapshot.objects.items()}),
        **snapshot.facts,
    }

    def write() -> Written:
        with explained(root):
            return _write(folder, members.rank, mine, snapshot.objects)

    def finish(everyone: list[Written]) -> list[None]:
        files = {file: saved for written, _ in everyone for file, saved in written.items()}
        _check_files(folder, files)
        tensors: dict[str, list[SavedTensor]] = {}
        for key, saved in (pair for _, pairs in everyone for pair in pairs):
            tensors.setdefault(key, []).append(saved)
        merged = {
            key: replace(cut[0], pieces=tuple(piece for one in cut for piece in one.pieces))
            for key, cut in tensors.items()
        }
        commit(root, name, Manifest(facts, files, merged), keep_last)
        return [None for _ in everyone]

    try:
        mine = share_out(snapshot.parts, members)
        members.assign(members.together(write), finish)
    except CheckpointError:
        if members.rank == 0:
            give_up(root, name)
        raise
    return root / name


def _digest(state: Json) -> str:
    text = json.dumps(state, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def share_out(parts: Sequence[NamedPart], members: Members) -> list[NamedPart]:
    """Return which of its parts this rank gives: each is given by one that has it."""
    filled = [(key, part) for key, part in parts if part.local.numel() or 0 in part.whole_shape]
    offers = [(key, describe_part(part)) for key, part in filled]
    return [filled[number] for number in members.assign(offers, _choose)]


def describe_part(
    part: Part, file: str = "", start: int = 0, crc32: tuple[int, ...] = ()
) -> SavedTensor:
    """Return what the manifest will say of a part; without a file, so much as is known before."""
    piece = SavedPiece(part.offsets, tuple(part.local.shape), file, start, crc32)
    return SavedTensor(part.dtype, part.whole_shape, (piece,))


def _choose(offers: list[list[tuple[str, SavedTensor]]]) -> list[list[int]]:
    """Return the numbers of the parts that each rank gives, most where least is given so far."""
    holders: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, tensors in enumerate(offers):
        for number, (key, tensor) in enumerate(tensors):
            place = (key, tensor.pieces[0].offsets)
            holders.setdefault(place, {}).setdefault(rank, number)
    chosen: list[list[int]] = [[] for _ in offers]
    num_bytes = [0 for _ in offers]
    missing: dict[str, int] = {}
    for places in sorted(holders.values(), key=len):  # first those of which nobody has a copy
        rank = min(places, key=lambda rank: num_bytes[rank])
        key, tensor = offers[rank][places[rank]]
        numel = math.prod(tensor.pieces[0].sizes)
        chosen[rank].append(places[rank])
        num_bytes[rank] += numel * tensor.dtype.itemsize
        missing[key] = missing.get(key, math.prod(tensor.shape)) - numel
    wrong = sorted(key for key, numel in missing.items() if numel)
    if wrong:
        raise CheckpointError(
            f"the parts of {wrong[0]!r} that the ranks have do not make up the whole: "
            f"{missing[wrong[0]]} elements are missing. Remedy: save on all ranks that share the "
            "model"
        )
    return chosen


def _write(
    folder: Path, rank: int, parts: Sequence[NamedPart], objects: dict[str, Json]
) -> Written:
    files: dict[str, SavedFile] = {}
    tensors: list[tuple[str, SavedTensor]] = []
    if parts:
        labels = [_label(key, part) for key, part in parts]
        named = {label: part.local for label, (_, part) in zip(labels, parts, strict=True)}
        order = order_of(named)
        begin, starts = make_header(named, order, {"format": "pt"})
        name = f"data-{rank:05d}.safetensors"
        with (folder / name).open("xb") as file:
            file.write(begin)
            checksums = _write_tensors(file, [named[label] for label in order])
            size = file.tell()
        files[name] = SavedFile(size, len(begin), zlib.crc32(begin))
        crc32 = dict(zip(order, checksums, strict=True))
        for label, (key, part) in zip(labels, parts, strict=True):
            tensors.append((key, describe_part(part, name, starts[label], crc32[label])))
    content = json.dumps(objects, allow_nan=False).encode()
    with (folder / objects_file(rank)).open("xb") as file:
        file.write(content)
        _sync(file)
    files[objects_file(rank)] = SavedFile(len(content), len(content), zlib.crc32(content))
    return files, tensors


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


def _label(key: str, part: Part) -> str:
    """Return a part's name in the file; of a part that is not all, with its place."""
    if part.local.shape == part.whole_shape:
        return key
    return f"{key}[{','.join(f'{place.start}:{place.stop}' for place in part.box)}]"


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
