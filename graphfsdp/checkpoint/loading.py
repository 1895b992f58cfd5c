"""`graphfsdp.load`: a checkpoint into what exists, in place, on any ranks."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from graphfsdp.base.sharded import units_of
from graphfsdp.checkpoint.folder import resolve
from graphfsdp.checkpoint.load_plan import LoadPlan, plan_model
from graphfsdp.checkpoint.manifest import Manifest, TensorFiles
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import as_module, name_model
from graphfsdp.checkpoint.objects import (
    BUFFERS,
    RANDOM,
    BufferState,
    RandomState,
    Stateful,
    check_objects,
)
from graphfsdp.checkpoint.optimizer import plan_optimizer
from graphfsdp.checkpoint.values import Json, decode
from graphfsdp.errors import CheckpointMismatchError
from graphfsdp.sharding.materialize import memory_for_values

if TYPE_CHECKING:
    from graphfsdp.base.torch_internals import PipelineSchedule


@dataclass(frozen=True)
class Loaded:
    """What a load has done.

    Attributes:
        step: Number that the checkpoint was saved with.
        path: Its folder.
    """

    step: int
    path: Path


def load(
    path: str | os.PathLike[str],
    model: "nn.Module | PipelineSchedule",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    objects: Mapping[str, Stateful] | None = None,
    step: int | None = None,
    rng: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a training state; every rank calls it, between two iterations.

    Values are copied into the tensors that exist, so a captured step goes on with them. The
    number of ranks, the sharding strategy and the precisions need not be those of the save. First
    every checksum is checked and everything compared; nothing is written if something is wrong.

    A model on the meta device gets memory for the values first. What no state dict of it has (some
    buffers) is initialised as by ``materialize``.

    Args:
        path: A folder of checkpoints, or one checkpoint in it.
        model: Whose parameters and buffers are filled; or a schedule of torch's pipelines, each
            rank of which loads what its stages have.
        optimizer: Its state and hyper-parameters too; None leaves the saved ones unread.
        objects: As for ``save``; saved ones that are not given are left unread.
        step: Which checkpoint of the folder; None is the latest.
        rng: Also set the generators, if they were saved.
        process_group: Ranks that load together; None is all.

    Returns:
        The step and the folder.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        CheckpointDamagedError: something in it is not what was saved.
        CheckpointMismatchError: it does not fit; the whole difference is listed.
        ConfigError: an argument cannot be used.
    """
    members = Members.find(process_group)
    things = dict(objects or {})
    check_objects(things)
    folder = members.first(lambda: resolve(Path(path), step))
    module: nn.Module = as_module(model)
    named = members.together(lambda: name_model(module))
    manifest = members.together(lambda: Manifest.read(folder))
    manifest.check_files(folder, members)
    files = members.together(lambda: TensorFiles(folder))
    plan = LoadPlan(manifest.facts, files.saved, named)

    def make_plan() -> None:
        plan_model(plan)
        if optimizer is not None:
            plan_optimizer(plan, optimizer)
        _plan_objects(plan, things, members, rng=rng)

    def refuse_misfits() -> None:
        if plan.problems:
            listed = "\n".join(f"  {problem}" for problem in plan.problems)
            raise CheckpointMismatchError(
                f"the checkpoint {folder} does not fit; nothing was loaded:\n{listed}\n"
                "Remedy: the model and optimizer that were saved; a part of a checkpoint is read "
                "by torch's functions (docs/checkpoints.md)"
            )

    with memory_for_values(module), torch.no_grad():
        members.together(make_plan)
        # What a checkpoint has of other stages of a pipeline is loaded there.
        plan.problems += sorted(set.intersection(*map(set, members.gather(plan.unused))))
        members.together(refuse_misfits)
        members.together(lambda: files.read(plan.parts))
        for action in plan.afterwards:
            action()
    for unit in units_of(module):
        unit.reshard()  # whole weights that were gathered before are not the loaded ones
    return Loaded(int(manifest.facts["step"]), folder)


def _plan_objects(
    plan: LoadPlan, things: dict[str, Stateful], members: Members, *, rng: bool
) -> None:
    states: list[dict[str, Json]] = plan.facts["objects"]
    exists = members.rank < len(states)
    saved = states[members.rank if exists else 0]
    for name in things:
        if name not in saved:
            plan.problems.append(f"objects: {name!r} is missing in the checkpoint")
        elif members.size != len(states) and any(s[name] != saved[name] for s in states):
            plan.problems.append(
                f"objects: {name!r} was saved with a state of its own on each of {len(states)} "
                f"ranks; here are {members.size}"
            )
    if BUFFERS in saved and members.size == len(states):
        things[BUFFERS] = BufferState(plan.model)
    if rng and RANDOM in saved:
        things[RANDOM] = RandomState(None if exists else members.rank)
    if not plan.problems:
        for name, thing in things.items():
            state = decode(saved[name], plan.read)
            plan.afterwards.append(functools.partial(thing.load_state_dict, state))
