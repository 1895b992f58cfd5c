"""What a checkpoint holds: a list in JSON with a checksum, and files as they were written."""

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from graphfsdp.checkpoint.folder import MANIFEST
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.values import Json
from graphfsdp.errors import CheckpointDamagedError, CheckpointError, first_line

_FORMAT = "graphfsdp checkpoint"
_VERSION = 3


class SavedTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


class SavedFile(NamedTuple):
    num_bytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> "SavedFile":
        """Describe a file, which may not be empty.

        Mapped: one call hashes all of it while another thread writes the next file.
        """
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return SavedFile(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without its tensors.

    Facts are step, versions; structure of model and optimizer, and the objects of each rank.
    """

    facts: dict[str, Json]
    files: dict[str, SavedFile]  # by name

    def to_bytes(self) -> bytes:
        body = _dump({"facts": self.facts, "files": self.files})
        digest = hashlib.sha256(body).hexdigest()
        start = _dump({"format": _FORMAT, "version": _VERSION, "sha256_of_body": digest})
        return start[:-1] + b', "body": ' + body + b"}\n"

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """CheckpointDamagedError: it is not what was written; CheckpointError: it is not there."""
        path = folder / MANIFEST
        try:
            document = json.loads(path.read_bytes())
            form = document["format"], int(document["version"])
            digest, body = document["sha256_of_body"], document["body"]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointDamagedError(f"{path} is damaged: {first_line(error)}") from None
        if form != (_FORMAT, _VERSION):
            raise CheckpointError(
                f"{path} has the format {form[0]!r} version {form[1]}; this release reads "
                f"{_FORMAT!r} version {_VERSION}. Remedy: the release that has saved it; weights "
                "and moments of version 2, which graphfsdp 0.2 has saved, are read by torch's "
                "HuggingFaceStorageReader too"
            )
        if hashlib.sha256(_dump(body)).hexdigest() != digest:
            raise CheckpointDamagedError(f"{path} is damaged: its checksum differs")
        files = {name: SavedFile(*file) for name, file in body["files"].items()}
        return Manifest(body["facts"], files)

    def check_files(self, folder: Path, members: Members) -> None:
        """Read every file once, each on one of the ranks; what one of them finds, all raise."""
        mine = sorted(self.files)[members.rank :: members.size]
        damage = [line for lines in members.gather(self._damage(folder, mine)) for line in lines]
        if damage:
            listed = "\n".join(f"  {line}" for line in damage)
            raise CheckpointDamagedError(
                f"the checkpoint {folder} is damaged; nothing was loaded:\n{listed}\n"
                "Remedy: load an earlier one (step=...), or copy this one anew"
            )

    def _damage(self, folder: Path, names: Iterable[str]) -> list[str]:
        found = []
        for name in names:
            path, expected = folder / name, self.files[name]
            try:
                if (size := path.stat().st_size) != expected.num_bytes:
                    found.append(f"{name} has {size} bytes, expected {expected.num_bytes}")
                elif SavedFile.of(path) != expected:
                    found.append(f"{name}: the checksum differs")
            except OSError as error:
                found.append(f"{name} cannot be read ({error.strerror or error})")
        return found


class TensorFiles:
    """The tensors of a checkpoint whose files were checked."""

    def __init__(self, folder: Path) -> None:
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        found: Mapping[str, Any] = self._metadata.state_dict_metadata
        self.saved = {
            key: SavedTensor(tensor.properties.dtype, tuple(tensor.size))
            for key, tensor in found.items()
        }

    def read(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Fill this rank's parts of tensors, by key."""
        for number in range(max(map(len, parts.values()), default=0)):
            now = {key: into[number] for key, into in parts.items() if number < len(into)}
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(now, self._metadata)
            with torch.device("cpu"):  # where slices of files come to
                self._reader.read_data(planner.create_local_plan(), planner)


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
