"""What a checkpoint holds: a list in JSON with a checksum, files that are as they were written."""

import hashlib
import json
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.storage import StorageReader

from graphfsdp.checkpoint.values import Json, dtype_name

MANIFEST = "manifest.json"
FORMAT = "graphfsdp checkpoint"
VERSION = 2


class SavedTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SavedFile:
    num_bytes: int
    sha256: str

    @staticmethod
    def of(file: BinaryIO) -> "SavedFile":
        """Describe a file, which may not be empty: mapped, since reading would copy it."""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return SavedFile(len(content), hashlib.sha256(content).hexdigest())

    def holds(self, file: BinaryIO) -> bool:
        """Compare a file's bytes with those that were written."""
        return SavedFile.of(file) == self

    def find_damage(self, path: Path) -> str | None:
        """Say what is wrong with the file; None if it is as it was written."""
        try:
            size = path.stat().st_size
            if size != self.num_bytes:
                return f"{path.name} has {size} bytes, expected {self.num_bytes}"
            with path.open("rb") as file:
                return None if self.holds(file) else f"{path.name}: the checksum differs"
        except OSError as error:
            return f"{path.name} cannot be read ({error.strerror or error})"


@dataclass
class Manifest:
    """All that a checkpoint holds: files by name, tensors by key.

    Facts are step, versions, number of ranks; structure of model, optimizer and objects.
    """

    facts: dict[str, Json]
    files: dict[str, SavedFile] = field(default_factory=dict)
    tensors: dict[str, SavedTensor] = field(default_factory=dict)

    def reader(self, folder: Path) -> StorageReader:
        """Return what reads the tensors out of files that were checked."""
        return HuggingFaceStorageReader(str(folder))

    def to_bytes(self) -> bytes:
        body = {
            "facts": self.facts,
            "files": {name: [file.num_bytes, file.sha256] for name, file in self.files.items()},
            "tensors": {
                key: [dtype_name(tensor.dtype), tensor.shape]
                for key, tensor in self.tensors.items()
            },
        }
        text = dump_body(body)
        digest = hashlib.sha256(text).hexdigest()
        start = {"format": FORMAT, "version": VERSION, "sha256_of_body": digest}
        return dump_body(start)[:-1] + b', "body": ' + text + b"}\n"


def dump_body(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, sort_keys=True).encode()
