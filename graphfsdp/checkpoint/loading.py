"""`graphfsdp.load`: a checkpoint into what exists, in place, on any ranks."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.base.sharded import units_of
from graphfsdp.checkpoint.folder import resolve
from graphfsdp.checkpoint.load_plan import LoadPlan, plan_model
from graphfsdp.checkpoint.manifest import Manifest
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import as_module, name_model, names_elsewhere, part_of
from graphfsdp.checkpoint.objects import (
    BufferState,
    RandomState,
    Stateful,
    check_objects,
)
from graphfsdp.checkpoint.optimizer import plan_optimizer
from graphfsdp.checkpoint.reading import name_last_good, read_manifest
from graphfsdp.checkpoint.saving import BUFFERS, RANDOM
from graphfsdp.checkpoint.values import decode, encode
from graphfsdp.errors import CheckpointDamagedError
from graphfsdp.sharding.materialize.materialize import memory_for_values

if TYPE_CHECKING:
    from graphfsdp.base.torch_internals import PipelineSchedule


@dataclass(frozen=True)
class Loaded:
    """What a load has done.

    Attributes:
        step: Number that the checkpoint was saved with.
        path: Its folder.
        skipped: What did not fit and was left as it was; empty unless ``strict=False``.
    """

    step: int
    path: Path
    skipped: tuple[str, ...]


def load(
    path: str | os.PathLike[str],
    model: "nn.Module | PipelineSchedule",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    objects: Mapping[str, Stateful] | None = None,
    step: int | None = None,
    strict: bool = True,
    rng: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a training state; every rank calls it, between two iterations.

    Values are copied into the tensors that exist, so a captured step goes on with them. The
    number of ranks, the sharding strategy and the precisions need not be those of the save. First
    everything is compared and every checksum checked; nothing is written if something is wrong.

    A model on the meta device gets memory for the values first. What the checkpoint does not
    hold of it (buffers that no state dict has; with ``strict=False`` also parameters) is
    initialised as by ``materialize``.

    Args:
        path: A folder of checkpoints, or one checkpoint in it.
        model: Whose parameters and buffers are filled; or a schedule of torch's pipelines, each
            rank of which loads what its stages have.
        optimizer: Its state and hyper-parameters too; None leaves the saved ones unread.
        objects: As for ``save``.
        step: Which checkpoint of the folder; None is the latest.
        strict: Refuse a checkpoint that does not fit in everything; else what does not fit is
            left as it is, and named in the result.
        rng: Also set the generators, if they were saved.
        process_group: Ranks that load together; None is all.

    Returns:
        The step, the folder, and what was skipped.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        CheckpointDamagedError: something in it is not what was saved.
        CheckpointMismatchError: it does not fit; the whole difference is listed.
        ConfigError: an argument cannot be used.
    """
    members = Members.find(process_group)
    check_objects(objects or {})
    folder = Path(members.first(lambda: str(resolve(Path(path), step))))
    module: nn.Module = as_module(model)
    named = members.together(lambda: name_model(module))
    elsewhere = names_elsewhere(module, named, members)

    def make_plan(manifest: Manifest) -> LoadPlan:
        plan = LoadPlan(manifest, named, elsewhere)
        plan_model(plan)
        if optimizer is not None:
            plan_optimizer(plan, optimizer)
        _plan_objects(plan, objects or {}, folder, members, rng=rng)
        if strict:
            plan.refuse_problems(folder)
        return plan

    try:
        manifest = members.together(lambda: read_manifest(folder))
        with memory_for_values(module) as have_values:
            plan = members.together(lambda: make_plan(manifest))
            manifest.check_files(folder, members)
            plan.carry_out(folder, members)
            have_values(plan.filled())
    except CheckpointDamagedError as error:  # on every rank
        found = members.first(lambda: name_last_good(folder))
        raise CheckpointDamagedError(f"{error}\n{found}") from None
    for unit in units_of(module):
        unit.reshard()  # whole weights that were gathered before are not the loaded ones
    return Loaded(int(manifest.facts["step"]), folder, tuple(plan.problems))


def _plan_objects(
    plan: LoadPlan,
    objects: Mapping[str, Stateful],
    folder: Path,
    members: Members,
    *,
    rng: bool,
) -> None:
    digests: list[dict[str, str]] = plan.manifest.facts["objects"]
    exists = members.rank < len(digests)
    saved = plan.manifest.read_objects(folder, members.rank if exists else 0)
    things = dict(objects)
    if BUFFERS in saved and members.size == len(digests):
        things[BUFFERS] = BufferState(plan.model)
    if rng and RANDOM in saved:
        things[RANDOM] = RandomState(None if exists else members.rank)
    for name, thing in things.items():
        if name not in saved:
            plan.problems.append(f"objects: {name!r} is missing in the checkpoint")
            continue
        other_ranks = name in objects and members.size != len(digests)
        if other_ranks and len({digest.get(name) for digest in digests}) > 1:
            plan.problems.append(
                f"objects: {name!r} was saved with a state of its own on each of {len(digests)} "
                f"ranks; here are {members.size}"
            )
            continue
        living = _living_dtensors(plan, name, thing)
        state = decode(saved[name], functools.partial(_read_object, plan, living))
        plan.afterwards.append(functools.partial(thing.load_state_dict, state))


def _living_dtensors(plan: LoadPlan, name: str, thing: Stateful) -> dict[str, Tensor]:
    """Return the DTensors in an object's present state by the key that they are saved under."""
    found: dict[str, Tensor] = {}

    def note(where: str, tensor: Tensor) -> str:
        if is_dtensor(tensor):
            found[where] = tensor
        return where

    if any(key.startswith(f"objects/{name}") for key in plan.manifest.tensors):
        encode(thing.state_dict(), f"objects/{name}", note)
    return found


def _read_object(plan: LoadPlan, living: Mapping[str, Tensor], key: str) -> Tensor:
    """Plan to read a tensor of an object: in place if it is a DTensor there, else a new one."""
    if key not in living:
        return plan.read_whole(key)
    plan.read_into(key, part_of(living[key]))
    return living[key]
