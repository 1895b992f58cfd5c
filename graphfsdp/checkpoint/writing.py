"""Writes a checkpoint through torch.distributed.checkpoint: complete and synced, or nothing."""

import hashlib
import itertools
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from graphfsdp.checkpoint.folder import Unfinished, explained
from graphfsdp.checkpoint.manifest import Manifest, SavedFile, SavedTensor, objects_file
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.objects import Snapshot
from graphfsdp.checkpoint.values import Json
from graphfsdp.errors import CheckpointError

# A rank writes about so many files, but none smaller than that: one is hashed and synced while the
# next one is written.
_NUM_FILES, _FILE_BYTES = 8, 64 << 20


def write_snapshot(snapshot: Snapshot, place: Unfinished, members: Members) -> Path:
    """Write, sync and show a checkpoint that was begun, or leave nothing of it; a collective."""
    try:
        with members.dcp_errors():
            dcp_save(
                snapshot.tensors,
                storage_writer=_Writer(snapshot, place, members),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=members.group,
                no_dist=members.group is None,
            )
    except CheckpointError:
        if members.rank == 0:
            place.give_up()
        raise
    return place.root / place.name


class _Writer(HuggingFaceStorageWriter):
    """Writes what torch's own writer does, but syncs and hashes it, and adds objects and manifest.

    torch's takes each file twice into memory, and twice as long.
    """

    def __init__(self, snapshot: Snapshot, place: Unfinished, members: Members) -> None:
        super().__init__(str(place.folder), save_distributed=True)
        self._snapshot, self._place, self._members = snapshot, place, members

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder is there

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder, rank, objects = self._place.folder, self._members.rank, self._snapshot.objects
        with explained(self._place.root), ThreadPoolExecutor(1, "graphfsdp-sync") as thread:
            path = folder / objects_file(rank)
            with path.open("xb") as file:
                file.write(_dump(objects))
            synced = {path.name: thread.submit(_sync, path)}
            for number, items in enumerate(_in_files(plan.items)):
                path = folder / f"data-{rank:05d}-{number}.safetensors"
                _write_tensors(path, items, planner)
                synced[path.name] = thread.submit(_sync, path)
            files = {name: file.result() for name, file in synced.items()}
        digests = {n: hashlib.sha256(_dump(state)).hexdigest()[:16] for n, state in objects.items()}
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(""), 0, (files, digests))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        ranks: list[tuple[dict[str, SavedFile], dict[str, str]]]
        ranks = [told.storage_data for (told,) in results]
        manifest = Manifest(
            {
                "step": self._place.step,
                "num_ranks": self._members.size,
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
                "objects": [digests for _, digests in ranks],
                **self._snapshot.facts,
            }
        )
        for files, _ in ranks:
            manifest.files |= files
        for key, tensor in metadata.state_dict_metadata.items():
            saved: Any = tensor
            manifest.tensors[key] = SavedTensor(saved.properties.dtype, tuple(saved.size))
        _check_sizes(self._place.folder, manifest.files)
        self._place.commit(manifest.to_bytes())


def _in_files(items: Sequence[WriteItem]) -> Iterable[list[WriteItem]]:
    """Return what goes into each file."""
    sizes = [item.tensor_storage_size() or 0 for item in items]
    enough = max(_FILE_BYTES, -(-sum(sizes) // _NUM_FILES))
    found: dict[int, list[WriteItem]] = {}
    for item, start in zip(items, itertools.accumulate(sizes, initial=0), strict=False):
        found.setdefault(start // enough, []).append(item)
    return found.values()


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
        (dtype,) = error.args
        names = [name for name, tensor in tensors.items() if tensor.dtype == dtype]
        raise CheckpointError(
            f"{names} have the dtype {dtype}, which a safetensors file cannot hold. Remedy: cast "
            "them or view them as another one"
        ) from error


def _sync(path: Path) -> SavedFile:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return SavedFile.of(path)


def _dump(value: Json) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _check_sizes(folder: Path, files: Mapping[str, SavedFile]) -> None:
    for name, (num_bytes, _) in files.items():
        path = folder / name
        seen = path.stat().st_size if path.exists() else "no"
        if seen != num_bytes:
            raise CheckpointError(
                f"{path} was written by its rank with {num_bytes} bytes, but rank 0 sees {seen} "
                "bytes. Remedy: a folder on a file system that all machines share"
            )
