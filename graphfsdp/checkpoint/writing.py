"""Writes a checkpoint through torch.distributed.checkpoint: complete and synced, or nothing."""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from graphfsdp.checkpoint.file_format import safetensors
from graphfsdp.checkpoint.folder import commit, explained, give_up, unfinished
from graphfsdp.checkpoint.manifest import Manifest, SavedFile, SavedTensor
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.values import Json
from graphfsdp.errors import CheckpointError

# A rank writes about so many files, but none smaller than that: one is hashed and synced while the
# next one is written.
_NUM_FILES, _FILE_BYTES = 8, 64 << 20


@dataclass(frozen=True)
class Snapshot:
    """All that one rank saves, at one moment."""

    tensors: dict[str, Tensor]
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
    facts = {
        "step": step,
        "num_ranks": members.size,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        **snapshot.facts,
    }
    try:
        with members.dcp_errors():
            dcp_save(
                snapshot.tensors,
                storage_writer=_Writer(
                    root, name, members.rank, snapshot.objects, facts, keep_last
                ),
                planner=_Planner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=members.group,
                no_dist=members.group is None,
            )
    except CheckpointError:
        if members.rank == 0:
            give_up(root, name)
        raise
    return root / name


class _Planner(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        try:
            return super().create_global_plan(all_plans)
        except ValueError as error:
            raise CheckpointError(
                f"the parts of the tensors that the ranks have do not make up the whole: {error}. "
                "Remedy: save on all ranks that share the model"
            ) from error


@dataclass(frozen=True)
class _RankFiles:
    """What a rank tells the first one."""

    files: dict[str, SavedFile]
    digests: dict[str, str]  # of its objects' states, by name


class _Writer(HuggingFaceStorageWriter):
    """Writes what torch's own writer does, but syncs and hashes it, and adds objects and manifest.

    torch's takes each file twice into memory, and twice as long.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        rank: int,
        objects: Mapping[str, Json],
        facts: dict[str, Json],
        keep_last: int | None,
    ) -> None:
        super().__init__(str(unfinished(root, name)), save_distributed=True)
        self._root, self._name, self._rank = root, name, rank
        self._objects = objects
        self._facts = facts
        self._keep_last = keep_last

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder is there

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder = unfinished(self._root, self._name)
        with explained(self._root), ThreadPoolExecutor(1, "graphfsdp-sync") as thread:
            objects = folder / objects_file(self._rank)
            with objects.open("xb") as file:
                file.write(json.dumps(self._objects, allow_nan=False).encode())
            paths, synced = [objects], [thread.submit(_sync, objects)]
            for number, items in enumerate(_in_files(plan.items)):
                path = folder / f"data-{self._rank:05d}-{number}.safetensors"
                _write_tensors(path, items, planner)
                paths.append(path)
                synced.append(thread.submit(_sync, path))
            files = {path.name: file.result() for path, file in zip(paths, synced, strict=True)}
        digests = {key: _digest(state) for key, state in self._objects.items()}
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(""), 0, _RankFiles(files, digests))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        ranks: list[_RankFiles] = [told.storage_data for (told,) in results]
        self._facts["objects"] = [rank.digests for rank in ranks]
        manifest = Manifest(self._facts)
        for rank in ranks:
            manifest.files |= rank.files
        for key, tensor in metadata.state_dict_metadata.items():
            saved: Any = tensor
            manifest.tensors[key] = SavedTensor(saved.properties.dtype, tuple(saved.size))
        _check_sizes(unfinished(self._root, self._name), manifest.files)
        commit(self._root, self._name, manifest.to_bytes(), self._keep_last)


def _in_files(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield what goes into each file."""
    sizes = [item.tensor_storage_size() or 0 for item in items]
    enough = max(_FILE_BYTES, -(-sum(sizes) // _NUM_FILES))
    found: list[WriteItem] = []
    num_bytes = 0
    for item, size in zip(items, sizes, strict=True):
        found.append(item)
        num_bytes += size
        if num_bytes >= enough:
            yield found
            found, num_bytes = [], 0
    if found:
        yield found


def _write_tensors(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> None:
    tensors: dict[str, Tensor] = {}
    addresses: set[int] = set()
    offsets = {}
    for item in items:
        assert item.tensor_data is not None
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        tensor = tensor.detach().cpu().contiguous()
        if tensor.data_ptr() in addresses:  # which safetensors refuses
            tensor = tensor.clone()
        addresses.add(tensor.data_ptr())
        tensors[item.index.fqn] = tensor
        offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    # What HuggingFaceStorageReader looks for.
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    try:
        safetensors("safetensors.torch").save_file(tensors, path, about)
    except KeyError as error:  # its word for a dtype that it has no name for
        dtype = error.args[0]
        name = next((name for name, tensor in tensors.items() if tensor.dtype == dtype), None)
        if name is None:
            raise
        raise CheckpointError(
            f"{name!r} has the dtype {dtype}, which a safetensors file cannot hold. Remedy: cast "
            "or view it as another one"
        ) from error


def _sync(path: Path) -> SavedFile:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return SavedFile.of(file)


def _digest(state: Json) -> str:
    text = json.dumps(state, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_sizes(folder: Path, files: Mapping[str, SavedFile]) -> None:
    for name, file in files.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size != file.num_bytes:
            raise CheckpointError(
                f"{path} was written by its rank with {file.num_bytes} bytes, but rank 0 "
                f"sees {'no such file' if size is None else f'{size} bytes'}. Remedy: a "
                "folder on a file system that all machines share"
            )
