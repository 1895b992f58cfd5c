"""`graphfsdp.save`: model, optimizer and objects into a folder, complete or not at all."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphfsdp.checkpoint.engine import Members, run_save
from graphfsdp.checkpoint.folder import begin, commit, give_up, unfinished
from graphfsdp.checkpoint.fused import FusedWeight
from graphfsdp.checkpoint.manifest import Manifest
from graphfsdp.checkpoint.named import model_parts, name_model
from graphfsdp.checkpoint.objects import (
    BufferState,
    Stateful,
    TensorSink,
    check_objects,
    encode_objects,
)
from graphfsdp.checkpoint.optimizer_save import describe_optimizer
from graphfsdp.checkpoint.parts import NamedPart
from graphfsdp.checkpoint.random_state import RandomState
from graphfsdp.checkpoint.values import Json, encode
from graphfsdp.checkpoint.writer import FolderWriter
from graphfsdp.errors import CheckpointError, ConfigError

# Names among the objects.
RANDOM = "random"
BUFFERS = "buffers"


@dataclass(frozen=True)
class Snapshot:
    """All that one rank saves, at one moment.

    Attributes:
        parts: Tensors.
        facts: What the manifest says of the structure.
        objects: Encoded states of objects.
    """

    parts: tuple[NamedPart, ...]
    facts: dict[str, Json]
    objects: dict[str, Json]


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes.

    Attributes:
        root: Folder of checkpoints.
        step: Number of this one.
        name: Its folder.
        keep_last: How many stay; None for all.
    """

    root: Path
    step: int
    name: str
    keep_last: int | None


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    objects: Mapping[str, Stateful] | None = None,
    step: int | None = None,
    keep_last: int | None = None,
    fused: Sequence[FusedWeight] = (),
    rng: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a training state; every rank calls it, between two iterations.

    It appears as ``path/step-00000020`` when it is complete, and the file ``path/latest`` names
    it from then on. If anything fails before, what was there stays as it was. Nothing is pickled.

    Args:
        path: Folder of this run's checkpoints, made if need be; one job at a time saves there.
        model: Sharded by ``fully_shard`` or by torch, replicated, or on one device.
        optimizer: Any torch optimizer; its state is kept by parameter name.
        objects: More things with ``state_dict`` and ``load_state_dict``, by name: a scheduler, a
            position in the data. Each rank's state is kept; where the number of ranks changes,
            only objects whose states were equal can be loaded.
        step: Number of the checkpoint; None is one more than the last in ``path``.
        keep_last: Then remove all but so many of the newest up to this one; None keeps all.
            Those of later steps, from before an earlier one was loaded, stay until passed.
        fused: Parameters to save as the matrices that they consist of.
        rng: Also save the generators of torch, numpy and Python.
        process_group: Ranks that save together; None is all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written; checkpoints that were complete are untouched.
        ConfigError: an argument cannot be used.
    """
    members = Members.find(process_group)
    check_arguments(objects, step, keep_last)
    snapshot = members.together(
        lambda: take_snapshot(
            model, optimizer, objects or {}, fused=fused, rng=rng, members=members
        )
    )
    target = begin_save(Path(path), step, keep_last, members)
    return write_snapshot(snapshot, target, members)


def check_arguments(
    objects: Mapping[str, Any] | None, step: int | None, keep_last: int | None
) -> None:
    """Refuse arguments of ``save``.

    Raises:
        ConfigError: one cannot be used.
    """
    check_objects(objects or {})
    taken = {RANDOM, BUFFERS} & set(objects or {})
    if taken:
        raise ConfigError(f"objects may not have the name {taken.pop()!r}, which is taken")
    for name, value, minimum in (("step", step, 0), ("keep_last", keep_last, 1)):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= minimum):
            raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    objects: Mapping[str, Stateful],
    *,
    fused: Sequence[FusedWeight],
    rng: bool,
    members: Members,
) -> Snapshot:
    """Describe what is to be saved; tensors are views of the living ones.

    Raises:
        CheckpointError: something could only be pickled, or a unit is unsharded.
    """
    named = name_model(model, fused)
    sink = TensorSink(named)
    parts = list(model_parts(named, with_buffers=members.rank == 0))
    extra = {name: state for name, (_, state) in named.extra.items()}
    facts: dict[str, Json] = {
        "aliases": named.aliases,
        "extra": encode(extra, "extra", sink.store),
    }
    if optimizer is not None:
        described = describe_optimizer(named, optimizer, sink.store)
        parts += described.parts
        facts["optimizer"] = described.facts
    everything = {**objects, **({RANDOM: RandomState()} if rng else {})}
    if members.size > 1 and named.buffers():
        everything[BUFFERS] = BufferState(named)
    encoded = encode_objects(everything, sink)
    return Snapshot((*parts, *sink.parts), facts, encoded)


def begin_save(root: Path, step: int | None, keep_last: int | None, members: Members) -> Target:
    """Make the folder that is written into; a collective.

    Raises:
        CheckpointError: it cannot be made.
    """
    number, name = members.first(lambda: begin(root, step))
    return Target(root, number, name, keep_last)


def write_snapshot(snapshot: Snapshot, target: Target, members: Members) -> Path:
    """Write, sync and show a checkpoint; a collective.

    Raises:
        CheckpointError: it cannot be written; then nothing of it is left.
    """
    digests = {name: _digest(state) for name, state in snapshot.objects.items()}
    facts = {
        "step": target.step,
        "num_ranks": members.size,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "objects": members.gather(digests),
        **snapshot.facts,
    }

    def show(manifest: Manifest) -> None:
        commit(target.root, target.name, manifest, target.keep_last)

    writer = FolderWriter(
        unfinished(target.root, target.name),
        members.rank,
        facts=facts,
        objects=snapshot.objects,
        commit=show,
    )
    try:
        run_save(snapshot.parts, writer, members)
    except CheckpointError:
        if members.rank == 0:
            give_up(target.root, target.name)
        raise
    return target.root / target.name


def _digest(state: Json) -> str:
    text = json.dumps(state, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
