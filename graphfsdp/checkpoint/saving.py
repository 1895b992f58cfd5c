"""`graphfsdp.save` and `AsyncSaver`: a training state into a folder, complete or not at all."""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from concurrent import futures
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from safetensors.torch import load, save_file
from safetensors.torch import save as as_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.stateful import Stateful

from graphfsdp.base.dtensors import is_dtensor, local_part, wrap_like
from graphfsdp.checkpoint.folder import Json, Unfinished, begin, digest_of, explained, sync
from graphfsdp.checkpoint.members import Members, as_ours
from graphfsdp.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    STEP,
    NamedModel,
    checked_objects,
    encode,
    name_model,
    params_by_name,
    part_of,
    random_state,
    refuse_name,
    state_part,
)
from graphfsdp.errors import CheckpointError, GraphFSDPError
from graphfsdp.optim.adapters.baked import skip_counter
from graphfsdp.optim.fused.adam import FusedAdam

if TYPE_CHECKING:
    from graphfsdp.base.torch_internals import PipelineSchedule

# A rank writes about so many files, but none smaller than that: one is hashed and synced while the
# next one is written.
_NUM_FILES, _FILE_BYTES = 8, 64 << 20
_NO_NUMBERS = frozenset({"params", "param_names"})  # of a group


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


@dataclasses.dataclass
class _Snapshot:
    """All that one rank saves, at one moment."""

    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    facts: dict[str, Json] = dataclasses.field(default_factory=dict)  # of model and optimizer
    own: dict[str, Json] = dataclasses.field(default_factory=dict)  # what each rank has apart

    def keep(self, key: str, tensor: Tensor) -> str:
        """Keep this rank's part; CheckpointError: it cannot be written as numbers in memory."""
        try:
            load(as_file({"": local_part(tensor).detach().new_empty(0, device="cpu")}))
            has_values = not tensor.is_meta
        except Exception:  # of safetensors or torch, each its own: KeyError, ValueError, ...
            has_values = False
        if not has_values:
            raise CheckpointError(
                f"{key} is a tensor of {tensor.dtype} with the layout {tensor.layout} on "
                f"{tensor.device}, which has no values yet or which a safetensors file cannot "
                "hold. Remedy: a dense tensor in its place that has values, of another dtype or "
                "viewed as one"
            )
        self.tensors[key] = part_of(tensor)
        return key

    def keep_plain(self, where: str, tensor: Tensor) -> str:
        """Return a key that has its digest: ranks whose tensors are equal write one."""
        if is_dtensor(tensor):
            raise CheckpointError(
                f"{where} is sharded, which only parts of a model and states of its optimizer may "
                "be. Remedy: save it as a part of the model, in an nn.ModuleDict with it"
            )
        self.keep(where, tensor)
        del self.tensors[where]
        tensor = _in_bytes(tensor)
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        return self.keep(f"{where}#{hashlib.sha256(content).hexdigest()[:16]}", tensor)

    def keep_state(self, param: Tensor, where: str, value: Tensor) -> str:
        """Keep what an optimizer has of a parameter."""
        part = None if where.endswith(f".{STEP}") else state_part(param, value)
        # Of a plain tensor beside a sharded parameter each rank may have another one.
        if part is None and (is_dtensor(value) or (is_dtensor(param) and value.numel() > 1)):
            raise CheckpointError(
                f"{where} has the shape {tuple(value.shape)} and belongs to a sharded parameter "
                f"of the shape {tuple(param.shape)}. Remedy: an optimizer whose states have their "
                "parameter's shape"
            )
        return self.keep(where, value if part is None else part)

    def describe(self, model: NamedModel, optimizer: torch.optim.Optimizer) -> dict[str, Json]:
        """Keep an optimizer's states, and return what is no tensor, by parameter name."""
        state_dict = optimizer.state_dict()
        skipped = skip_counter(optimizer)
        if skipped is not None:  # as the optimizers that count themselves have it
            state_dict.setdefault("control", {"skipped_steps": skipped})
        # What torch's optimizers keep in their groups.
        settings = optimizer.settings.in_groups() if isinstance(optimizer, FusedAdam) else {}
        groups: list[Json] = []
        for row, group in enumerate(state_dict["param_groups"]):
            numbers = {key: value for key, value in group.items() if key not in _NO_NUMBERS}
            where = f"optimizer.param_groups[{row}]"
            groups.append(encode(numbers | settings, where, self.keep_plain))
        facts: dict[str, Json] = {"kind": type(optimizer).__name__, "hyper": {}, "state": {}}
        common = dict(state_dict["state"])  # what is left of it belongs to no parameter
        for row, name, param, index in params_by_name(model, optimizer, state_dict):
            facts["hyper"][name] = groups[row]
            state, store = common.pop(index, {}), partial(self.keep_state, param)
            facts["state"][name] = encode(state, f"{OPTIMIZER}{name}", store)
        if common:
            raise CheckpointError(
                f"{sorted(map(str, common))} in the optimizer's state belong to no parameter. "
                "Remedy: keep them in an object of their own (objects={...})"
            )
        rest = {key: state_dict[key] for key in state_dict.keys() - {"state", "param_groups"}}
        return {**facts, "rest": encode(rest, "optimizer", self.keep_plain)}


def _take_snapshot(
    model: "nn.Module | PipelineSchedule",
    optimizer: torch.optim.Optimizer | None,
    objects: Mapping[str, Stateful] | None,
    members: Members,
    *,
    rng: bool,
) -> _Snapshot:
    """Return the state as it lies in memory."""
    things, named = members.together(lambda: (checked_objects(objects), name_model(model)))
    buffers = named.buffers() if members.size > 1 and not named.stages else {}

    def take() -> _Snapshot:
        snapshot = _Snapshot()
        for name, tensor in named.tensors.items():
            if members.rank == 0 or name not in buffers:
                snapshot.keep(f"{MODEL}{name}", tensor)
        extra = {name: state for name, (_, state) in named.extra.items()}
        snapshot.facts["extra"] = encode(extra, "extra", snapshot.keep_plain)
        if optimizer is not None:
            snapshot.facts["optimizer"] = snapshot.describe(named, optimizer)
        states = {f"objects/{name}": thing.state_dict() for name, thing in things.items()}
        states |= {"random": random_state()} if rng else {}
        states |= {"buffers": buffers} if buffers else {}
        for where, state in states.items():
            snapshot.own[where] = encode(state, where, snapshot.keep_plain)
        return snapshot

    snapshot = members.together(take)
    if named.stages:
        everyone = members.gather((named.stages, named.names, snapshot.facts))
        snapshot.facts = members.together(lambda: _join(everyone))
    return snapshot


def _join(told: Sequence[tuple[tuple[int, ...], set[str], dict[str, Json]]]) -> dict[str, Json]:
    """Return what ranks say of a pipeline as if one had all stages: of which, their names, facts.

    ConfigError: two stages use the same name.
    """
    holders: dict[str, tuple[int, ...]] = {}
    joined = told[0][2]
    for stages, names, facts in told:
        for name in sorted(names):
            if holders.setdefault(name, stages) != stages:
                raise refuse_name(name)
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
        self._group: Any = None
        if self._members.group is not None:
            # Of its own, so that its collectives cannot mix with those of the training.
            ranks = dist.get_process_group_ranks(self._members.group)
            self._group = dist.new_group(ranks, backend="gloo")

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
        background = dataclasses.replace(members, group=self._group)
        self._saving = self._thread.submit(_write_snapshot, snapshot, place, background)

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
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _copy(self, snapshot: _Snapshot) -> None:
        """Copy its tensors into memory on the CPU, which stays for the next save."""
        copies: dict[str, Tensor] = {}
        devices = set()
        for key, tensor in snapshot.tensors.items():
            local, memory = local_part(tensor), self._memory.get(key)
            if memory is None or (memory.shape, memory.dtype) != (local.shape, local.dtype):
                memory = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            copies[key] = memory.copy_(local, non_blocking=True)
            snapshot.tensors[key] = wrap_like(memory, tensor)
            devices.add(local.device)
        # Whichever device is current: a rank may train on another one.
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self._memory = copies


def _write_snapshot(snapshot: _Snapshot, place: Unfinished, members: Members) -> Path:
    """Write, sync and show a checkpoint that was begun, or leave nothing of it; a collective."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(snapshot.tensors, is_coordinator=members.rank == 0)
    try:
        plan = members.together(planner.create_local_plan)
        plan = members.share_out(plan, lambda plans: planner.create_global_plan(plans)[0])
        planner.finish_plan(plan)
        digests = members.together(lambda: _write_files(planner, place, members.rank))
        everyone = members.gather((digests, snapshot.own))
        return members.first(lambda: place.commit(snapshot.facts, everyone))
    except Exception as error:
        if members.rank == 0:
            place.give_up()
        if isinstance(error, GraphFSDPError):
            raise
        raise as_ours(error) from error


def _write_files(planner: DefaultSavePlanner, place: Unfinished, rank: int) -> dict[str, str]:
    """Write, sync and hash what this rank writes; return the digests of files by name.

    HuggingFaceStorageWriter takes each file twice into memory, and twice as long.
    """

    def finish(path: Path) -> str:
        sync(path)
        return digest_of(path)

    items = planner.plan.items
    sizes = [item.tensor_storage_size() or 0 for item in items]
    enough = max(_FILE_BYTES, -(-sum(sizes) // _NUM_FILES))
    starts = itertools.accumulate(sizes, initial=0)
    numbered = zip((start // enough for start in starts), items, strict=False)
    with explained(place.root), futures.ThreadPoolExecutor(1, "graphfsdp-sync") as thread:
        finished = {}
        for number, (_, group) in enumerate(itertools.groupby(numbered, key=itemgetter(0))):
            path = place.folder / f"data-{rank:05d}-{number}.safetensors"
            _write_tensors(path, [item for _, item in group], planner)
            finished[path.name] = thread.submit(finish, path)
        return {name: digest.result() for name, digest in finished.items()}


def _write_tensors(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> None:
    tensors: dict[str, Tensor] = {}
    offsets = {}
    for item in items:
        assert item.tensor_data is not None
        tensors[item.index.fqn] = _in_bytes(planner.resolve_data(item))
        offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda each: each[1].data_ptr()):
        if tensor.data_ptr() < end:  # safetensors refuses what shares memory
            tensors[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    # What HuggingFaceStorageReader looks for.
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    save_file(tensors, path, about)


def _in_bytes(tensor: Any) -> Tensor:
    """Return it on the CPU, its memory being its values in order."""
    found: Tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return found
