"""`graphfsdp.load`: a checkpoint into what exists, in place, on any ranks."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.base.sharded import units_of
from graphfsdp.checkpoint.folder import MANIFEST, resolve
from graphfsdp.checkpoint.load_plan import LoadPlan, plan_model
from graphfsdp.checkpoint.manifest import FORMAT, VERSION, Manifest, SavedFile, SavedTensor, dump
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import as_module, name_model
from graphfsdp.checkpoint.objects import (
    BUFFERS,
    RANDOM,
    BufferState,
    RandomState,
    Snapshot,
    Stateful,
    check_arguments,
)
from graphfsdp.checkpoint.optimizer import plan_optimizer
from graphfsdp.checkpoint.values import decode, dtype_of
from graphfsdp.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    first_line,
)
from graphfsdp.sharding.materialize import memory_for_values

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
    check_arguments(model, optimizer, objects)
    folder = members.first(lambda: resolve(Path(path), step))
    module: nn.Module = as_module(model)
    named = members.together(lambda: name_model(module))
    plan = members.together(lambda: LoadPlan(_read_manifest(folder), named))

    def make_plan() -> None:
        plan_model(plan)
        if optimizer is not None:
            plan_optimizer(plan, optimizer)
        _plan_objects(plan, objects or {}, folder, members, rng=rng)

    def refuse_misfits() -> None:
        if strict and plan.problems:
            listed = "\n".join(f"  {problem}" for problem in plan.problems)
            raise CheckpointMismatchError(
                f"the checkpoint {folder} does not fit; nothing was loaded:\n{listed}\n"
                "Remedy: the model and optimizer that were saved, or strict=False, which leaves as "
                "it is what does not fit"
            )

    with memory_for_values(module) as have_values, torch.no_grad():
        members.together(make_plan)
        # What a checkpoint has of other stages of a pipeline is loaded there.
        plan.problems += sorted(set.intersection(*map(set, members.gather(plan.unused))))
        members.together(refuse_misfits)
        plan.manifest.check_files(folder, members)
        members.together(lambda: plan.manifest.read(folder, plan.parts))
        for action in plan.afterwards:
            action()
        have_values(t for name, t in named.tensors.items() if name not in plan.unread)
    for unit in units_of(module):
        unit.reshard()  # whole weights that were gathered before are not the loaded ones
    return Loaded(int(plan.manifest.facts["step"]), folder, tuple(plan.problems))


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
        state = decode(saved[name], _find(plan, name, thing))
        plan.afterwards.append(functools.partial(thing.load_state_dict, state))


def _find(plan: LoadPlan, name: str, thing: Stateful) -> Callable[[str], Tensor]:
    """Return what plans to read a tensor of an object: into the DTensor there, or a new one."""
    here = Snapshot()
    if any(key.startswith(f"objects/{name}") for key in plan.manifest.tensors):
        here.add_objects({name: thing})

    def find(key: str) -> Tensor:
        part = here.tensors.get(key)
        reads_there = (
            part is not None
            and is_dtensor(part)
            and plan.fits(key, part.shape, f"objects: {key!r}")
        )
        return plan.read(key, part if reads_there else None)

    return find


def _read_manifest(folder: Path) -> Manifest:
    """Read the list of a checkpoint.

    CheckpointDamagedError: it is not what was written; CheckpointError: it cannot be read.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
        kind, version = document["format"], int(document["version"])
        digest, body = document["sha256_of_body"], document["body"]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: {first_line(error)}") from None
    if (kind, version) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} has the format {kind!r} version {version}; this release reads {FORMAT!r} "
            f"version {VERSION}. Remedy: of version 1, which graphfsdp 0.1 has saved, a load and a "
            "save with graphfsdp 0.2"
        )
    if hashlib.sha256(dump(body)).hexdigest() != digest:
        raise CheckpointDamagedError(f"{path} is damaged: its checksum differs")
    tensors = {
        key: SavedTensor(dtype_of(dtype), tuple(shape))
        for key, (dtype, shape) in body["tensors"].items()
    }
    files = {name: SavedFile(*file) for name, file in body["files"].items()}
    return Manifest(body["facts"], files, tensors)
