"""The list of all that a checkpoint holds: JSON with a checksum, read without running anything."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphfsdp.checkpoint.values import Json, dtype_name, dtype_of
from graphfsdp.errors import CheckpointDamagedError, CheckpointError

MANIFEST = "manifest.json"
FORMAT = "graphfsdp checkpoint"
VERSION = 1
# Each block of a piece has a checksum of its own, so that who reads a part checks that part.
BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class SavedPiece:
    """One box of a tensor, in one file."""

    offsets: tuple[int, ...]  # in the whole tensor
    sizes: tuple[int, ...]
    file: str
    start: int  # first byte in the file
    crc32: tuple[int, ...]  # of each BLOCK_BYTES bytes


@dataclass(frozen=True)
class SavedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True)
class SavedFile:
    num_bytes: int
    head_bytes: int  # so many at its start belong to no tensor
    head_crc32: int


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint holds: files by name, tensors by key.

    Facts are step, versions, number of ranks; structure of model, optimizer and objects.
    """

    facts: dict[str, Json]
    files: dict[str, SavedFile] = field(default_factory=dict)
    tensors: dict[str, SavedTensor] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        body = {
            "facts": self.facts,
            "files": {
                name: [file.num_bytes, file.head_bytes, file.head_crc32]
                for name, file in self.files.items()
            },
            "tensors": {
                key: {
                    "dtype": dtype_name(tensor.dtype),
                    "shape": list(tensor.shape),
                    "pieces": [
                        [p.offsets, p.sizes, p.file, p.start, p.crc32] for p in tensor.pieces
                    ],
                }
                for key, tensor in self.tensors.items()
            },
        }
        text = _dump(body)
        digest = hashlib.sha256(text).hexdigest()
        start = {"format": FORMAT, "version": VERSION, "sha256_of_body": digest}
        return _dump(start)[:-1] + b', "body": ' + text + b"}\n"


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
    try:
        document = json.loads(content)
        known, version = document["format"] == FORMAT, int(document["version"])
        digest, body = document["sha256_of_body"], document["body"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: {error!r}") from None
    if not known or version > VERSION:
        raise CheckpointError(
            f"{path} has the format {document['format']!r} version {version}; this release reads "
            f"{FORMAT!r} up to version {VERSION}"
        )
    if hashlib.sha256(_dump(body)).hexdigest() != digest:
        raise CheckpointDamagedError(f"{path} is damaged: its checksum differs")
    return Manifest(
        facts=body["facts"],
        files={name: SavedFile(*numbers) for name, numbers in body["files"].items()},
        tensors={
            key: SavedTensor(
                dtype=dtype_of(entry["dtype"]),
                shape=tuple(entry["shape"]),
                pieces=tuple(
                    SavedPiece(tuple(offsets), tuple(sizes), file, start, tuple(crc32))
                    for offsets, sizes, file, start, crc32 in entry["pieces"]
                ),
            )
            for key, entry in body["tensors"].items()
        },
    )


def _dump(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, sort_keys=True).encode()
