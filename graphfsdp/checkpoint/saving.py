"""`graphfsdp.save` and `AsyncSaver`: a training state into a folder, complete or not at all."""

import itertools
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from graphfsdp.base.dtensors import local_part, wrap_like
from graphfsdp.checkpoint.folder import Unfinished, begin, explained, sync
from graphfsdp.checkpoint.manifest import Manifest, SavedFile
from graphfsdp.checkpoint.members import Members, as_ours
from graphfsdp.checkpoint.named import MODEL, Stages, as_module, name_model, refuse_name
from graphfsdp.checkpoint.objects import (
    BUFFERS,
    RANDOM,
    BufferState,
    RandomState,
    Stateful,
    check_objects,
)
from graphfsdp.checkpoint.optimizer import describe_optimizer
from graphfsdp.checkpoint.snapshot import Snapshot, in_bytes
from graphfsdp.checkpoint.values import Json, encode
from graphfsdp.errors import CheckpointError, GraphFSDPError

if TYPE_CHECKING:
    from graphfsdp.base.torch_internals import PipelineSchedule

# A rank writes about so many files, but none smaller than that: one is hashed and synced while the
# next one is written.
_NUM_FILES, _FILE_BYTES = 8, 64 << 20


def save(
    path: str | os.PathLike[str],
    model: "nn.Module | PipelineSchedule",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    objects: Mapping[str, Stateful] | None = None,
    step: int | None = None,
    keep_last: int | None = None,
    rng: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a training state; every rank calls it, between two iterations.

    It appears as ``path/step-00000020`` when it is complete, and the file ``path/latest`` names
    it from then on. If anything fails before, what was there stays as it was. Nothing is pickled.

    Args:
        path: Folder of this run's checkpoints, made if need be; one job at a time saves there.
        model: Sharded by ``fully_shard`` or by torch, replicated, or on one device; or a schedule
            of torch's pipelines, whose stages name their parts as the whole model does.
        optimizer: Any torch optimizer; its state is kept by parameter name.
        objects: More things with ``state_dict`` and ``load_state_dict``, by name: a scheduler, a
            position in the data. Each rank's state is kept; where the number of ranks changes,
            only objects whose states were equal can be loaded.
        step: Number of the checkpoint; None is one more than the last in ``path``.
        keep_last: Then remove all but so many of the newest up to this one; None keeps all.
            Those of later steps, from before an earlier one was loaded, stay until passed.
        rng: Also save the generators of torch, numpy and Python.
        process_group: Ranks that save together; None is all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written; checkpoints that were complete are untouched.
        ConfigError: an argument cannot be used.
    """
    members = Members.find(process_group)
    snapshot = _take_snapshot(model, optimizer, objects, members, rng=rng)
    place = members.first(lambda: begin(Path(path), step, keep_last))
    return _write_snapshot(snapshot, place, members)


def _take_snapshot(
    model: "nn.Module | PipelineSchedule",
    optimizer: torch.optim.Optimizer | None,
    objects: Mapping[str, Stateful] | None,
    members: Members,
    *,
    rng: bool,
) -> Snapshot:
    """Return the state as it lies in memory."""
    things = dict(objects or {})
    check_objects(things)
    if rng:
        things[RANDOM] = RandomState()
    module: nn.Module = as_module(model)
    named = members.together(lambda: name_model(module))

    def take() -> Snapshot:
        snapshot, left_out = Snapshot(), {}
        if members.size > 1 and named.buffers() and not isinstance(module, Stages):
            things[BUFFERS] = BufferState(named)
            left_out = named.buffers() if members.rank else {}
        for name, tensor in named.tensors.items():
            if name not in left_out:
                snapshot.keep(f"{MODEL}{name}", tensor)
        extra = {name: state for name, (_, state) in named.extra.items()}
        snapshot.facts["extra"] = encode(extra, "extra", snapshot.keep_plain)
        if optimizer is not None:
            snapshot.facts["optimizer"] = describe_optimizer(named, optimizer, snapshot)
        for name, thing in things.items():
            state = thing.state_dict()
            snapshot.objects[name] = encode(state, f"objects/{name}", snapshot.keep_plain)
        return snapshot

    snapshot = members.together(take)
    if isinstance(module, Stages):
        everyone = members.gather((module.indices, named.names, snapshot.facts))
        snapshot.facts = members.together(lambda: _join(everyone))
    return snapshot


def _join(told: Sequence[tuple[tuple[int, ...], set[str], dict[str, Json]]]) -> dict[str, Json]:
    """Return what ranks say of a pipeline as if one had all stages: of which, their names, facts.

    ConfigError: two stages use the same name.
    """
    holders: dict[str, tuple[int, ...]] = {}
    for indices, names, _ in told:
        for name in sorted(names):
            if holders.setdefault(name, indices) != indices:
                raise refuse_name(name)
    joined = told[0][2]
    for *_, facts in told[1:]:
        joined["extra"] |= facts["extra"]
        for key in ("hyper", "state") if "optimizer" in joined else ():
            joined["optimizer"][key] |= facts["optimizer"][key]
    return joined


class AsyncSaver:
    """Saves in the background; one save at a time.

    ``save`` copies everything to the CPU before it returns, so what is written is the state at
    that moment, whatever training does meanwhile. The copies' memory is used again by the next
    save. A context manager; leaving it waits for what is being written.
    """

    # By hand: dcp.async_save leaves no say over that memory, and torch 2.11's DefaultStager gives
    # it up after each copy.

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Prepare to save; every rank makes one.

        Args:
            process_group: Ranks that save together; None is all.
        """
        self._members = Members.find(process_group)
        self._thread = futures.ThreadPoolExecutor(1, "graphfsdp-save")
        self._is_closed = False
        self._saving: futures.Future[Path] | None = None
        self._result: Path | None = None
        self._memory: dict[str, Tensor] = {}
        self._background = self._members
        if self._members.group is not None:
            # Of its own, so that its collectives cannot mix with those of the training.
            ranks = dist.get_process_group_ranks(self._members.group)
            group = dist.new_group(ranks, backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._background = Members(group, self._members.rank, self._members.size)

    def save(
        self,
        path: str | os.PathLike[str],
        model: "nn.Module | PipelineSchedule",
        optimizer: torch.optim.Optimizer | None = None,
        *,
        objects: Mapping[str, Stateful] | None = None,
        step: int | None = None,
        keep_last: int | None = None,
        rng: bool = True,
    ) -> None:
        """Copy the state, and begin to write it; waits for the save before, if need be.

        Arguments are those of ``graphfsdp.save``.

        Raises:
            CheckpointError: this save cannot begin, or the one before has failed.
            ConfigError: an argument cannot be used.
        """
        self.wait()
        if self._is_closed:
            raise CheckpointError("this AsyncSaver was closed. Remedy: make another one")
        members = self._members
        snapshot = _take_snapshot(model, optimizer, objects, members, rng=rng)
        members.together(lambda: self._copy(snapshot))
        place = members.first(lambda: begin(Path(path), step, keep_last))
        self._saving = self._thread.submit(_write_snapshot, snapshot, place, self._background)

    @property
    def is_saving(self) -> bool:
        """Whether a save is still being written."""
        return self._saving is not None and not self._saving.done()

    def wait(self) -> Path | None:
        """Wait until what was saved is complete.

        Returns:
            The folder of the last checkpoint; None if there was none.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saving is not None:
            futures.wait([self._saving])  # first, since Ctrl-C may end the wait
            saving, self._saving = self._saving, None
            self._result = saving.result()
        return self._result

    def close(self) -> None:
        """Wait, and leave the group; every rank, before the process group goes.

        Raises:
            CheckpointError: the last save could not be written.
        """
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._memory.clear()
            if self._background is not self._members and self._background.group is not None:
                dist.destroy_process_group(self._background.group)
                self._background = self._members

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _copy(self, snapshot: Snapshot) -> None:
        """Copy its tensors into memory on the CPU, which stays for the next save."""
        copies: dict[str, Tensor] = {}
        tensors = snapshot.tensors
        for key, tensor in tensors.items():
            local, memory = local_part(tensor), self._memory.get(key)
            if memory is None or (memory.shape, memory.dtype) != (local.shape, local.dtype):
                memory = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            copies[key] = memory.copy_(local, non_blocking=True)
        # Whichever device is current: a rank may train on another one.
        for device in {local_part(tensor).device for tensor in tensors.values()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self._memory = copies
        snapshot.tensors = {key: wrap_like(copies[key], each) for key, each in tensors.items()}


def _write_snapshot(snapshot: Snapshot, place: Unfinished, members: Members) -> Path:
    """Write, sync and show a checkpoint that was begun, or leave nothing of it; a collective."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(snapshot.tensors, is_coordinator=members.rank == 0)
    try:
        plan = members.together(planner.create_local_plan)
        plan = members.share_out(plan, lambda plans: planner.create_global_plan(plans)[0])
        planner.finish_plan(plan)
        files = members.together(lambda: _write_files(planner, place, members.rank))
        everyone = members.gather((files, snapshot.objects))
        return members.first(lambda: _commit(place, snapshot.facts, everyone))
    except Exception as error:
        if members.rank == 0:
            place.give_up()
        if isinstance(error, GraphFSDPError):
            raise
        raise as_ours(error) from error


def _write_files(planner: DefaultSavePlanner, place: Unfinished, rank: int) -> dict[str, SavedFile]:
    """Write, sync and hash what this rank writes.

    HuggingFaceStorageWriter takes each file twice into memory, and twice as long.
    """
    with explained(place.root), futures.ThreadPoolExecutor(1, "graphfsdp-sync") as thread:
        synced = {}
        for number, items in enumerate(_in_files(planner.plan.items)):
            path = place.folder / f"data-{rank:05d}-{number}.safetensors"
            _write_tensors(path, items, planner)
            synced[path.name] = thread.submit(_sync, path)
        return {name: file.result() for name, file in synced.items()}


def _commit(
    place: Unfinished,
    facts: Mapping[str, Json],
    everyone: Sequence[tuple[dict[str, SavedFile], dict[str, Json]]],
) -> Path:
    """Write down what ranks have written, and the states of their objects, and show it."""
    manifest = Manifest(
        facts={
            "step": place.step,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "objects": [objects for _, objects in everyone],
            **facts,
        },
        files={name: file for files, _ in everyone for name, file in files.items()},
    )
    for name, (num_bytes, _) in manifest.files.items():
        path = place.folder / name
        seen = path.stat().st_size if path.exists() else "no"
        if seen != num_bytes:
            raise CheckpointError(
                f"{path} was written by its rank with {num_bytes} bytes, but rank 0 sees {seen} "
                "bytes. Remedy: a folder on a file system that all machines share"
            )
    return place.commit(manifest.to_bytes())


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
    offsets = {}
    for item in items:
        assert item.tensor_data is not None
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        tensors[item.index.fqn] = in_bytes(tensor)
        offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda each: each[1].data_ptr()):
        if tensor.data_ptr() < end:  # safetensors refuses what shares memory
            tensors[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    # What HuggingFaceStorageReader looks for.
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    save_file(tensors, path, about)


def _sync(path: Path) -> SavedFile:
    sync(path)
    return SavedFile.of(path)
