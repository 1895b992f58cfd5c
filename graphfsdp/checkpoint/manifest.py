"""What a checkpoint holds: a list in JSON with a checksum, and files as they were written."""

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.values import Json, dtype_name
from graphfsdp.errors import CheckpointDamagedError, CheckpointError, first_line

FORMAT = "graphfsdp checkpoint"
VERSION = 2


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


@dataclass
class Manifest:
    """All that a checkpoint holds: files by name, tensors by key.

    Facts are step, versions, number of ranks; structure of model, optimizer and objects.
    """

    facts: dict[str, Json]
    files: dict[str, SavedFile] = field(default_factory=dict)
    tensors: dict[str, SavedTensor] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        tensors = {key: [dtype_name(dtype), shape] for key, (dtype, shape) in self.tensors.items()}
        body = dump({"facts": self.facts, "files": self.files, "tensors": tensors})
        digest = hashlib.sha256(body).hexdigest()
        start = dump({"format": FORMAT, "version": VERSION, "sha256_of_body": digest})
        return start[:-1] + b', "body": ' + body + b"}\n"

    def read(self, folder: Path, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Fill this rank's parts of tensors, by key, from files that were checked.

        CheckpointError: one of them went away since, or its disk did.
        """
        reader = HuggingFaceStorageReader(str(folder))
        try:
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, is_coordinator=False)
            for number in range(max(map(len, parts.values()), default=0)):
                now = {key: into[number] for key, into in parts.items() if number < len(into)}
                planner = DefaultLoadPlanner(
                    flatten_state_dict=False, flatten_sharded_tensors=False
                )
                planner.set_up_planner(now, metadata)
                with torch.device("cpu"):  # where slices of files come to
                    reader.read_data(planner.create_local_plan(), planner)
        except Exception as error:  # of the system, of safetensors, no memory
            raise CheckpointError(
                f"a file of {folder} could be checked, and not read behind that "
                f"({first_line(error)}); a part of it may be loaded. Remedy: load again, or an "
                "earlier one (step=...)"
            ) from error

    def read_objects(self, folder: Path, rank: int) -> dict[str, Json]:
        """Return the states in a rank's file of objects, which is checked before it is read."""
        name = objects_file(rank)
        _refuse_damage(folder, self._damage(folder, [name]))
        found: dict[str, Json] = json.loads((folder / name).read_bytes())
        return found

    def check_files(self, folder: Path, members: Members) -> None:
        """Read every file once, each on one of the ranks; what one of them finds, all raise."""
        mine = sorted(self.files)[members.rank :: members.size]
        damage = members.gather(self._damage(folder, mine))
        _refuse_damage(folder, [line for lines in damage for line in lines])

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


def objects_file(rank: int) -> str:
    return f"objects-{rank:05d}.json"


def _refuse_damage(folder: Path, damage: Sequence[str]) -> None:
    if not damage:
        return
    listed = "\n".join(f"  {line}" for line in damage)
    raise CheckpointDamagedError(
        f"the checkpoint {folder} is damaged; nothing was loaded:\n{listed}\n"
        "Remedy: load an earlier one (step=...), or copy this one anew"
    )


def dump(value: Any, *, sort_keys: bool = True) -> bytes:
    return json.dumps(value, allow_nan=False, sort_keys=sort_keys).encode()
