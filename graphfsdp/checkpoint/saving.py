"""`graphfsdp.save` and `AsyncSaver`: a training state into a folder, complete or not at all."""

import hashlib
import json
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.checkpoint.folder import begin, commit, give_up, unfinished
from graphfsdp.checkpoint.manifest import Manifest
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import model_parts, name_model
from graphfsdp.checkpoint.objects import (
    BufferState,
    RandomState,
    Stateful,
    TensorSink,
    check_objects,
    encode_objects,
)
from graphfsdp.checkpoint.optimizer import describe_optimizer
from graphfsdp.checkpoint.parts import FusedWeight, NamedPart
from graphfsdp.checkpoint.values import Json, encode
from graphfsdp.checkpoint.writing import write_files
from graphfsdp.errors import CheckpointError, ConfigError

# Names among the objects.
RANDOM = "random"
BUFFERS = "buffers"


@dataclass(frozen=True)
class Snapshot:
    """All that one rank saves, at one moment."""

    parts: tuple[NamedPart, ...]
    facts: dict[str, Json]  # for the manifest
    objects: dict[str, Json]  # encoded states


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
    _check_arguments(objects, step, keep_last)
    snapshot = members.together(
        lambda: _take_snapshot(
            model, optimizer, objects or {}, fused=fused, rng=rng, members=members
        )
    )
    root = Path(path)
    found, name = members.first(lambda: begin(root, step))
    return write_snapshot(snapshot, root, name, found, members, keep_last=keep_last)


def _check_arguments(
    objects: Mapping[str, Any] | None, step: int | None, keep_last: int | None
) -> None:
    check_objects(objects or {})
    taken = {RANDOM, BUFFERS} & set(objects or {})
    if taken:
        raise ConfigError(f"objects may not have the name {taken.pop()!r}, which is taken")
    for name, value, minimum in (("step", step, 0), ("keep_last", keep_last, 1)):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= minimum):
            raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")


def _take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    objects: Mapping[str, Stateful],
    *,
    fused: Sequence[FusedWeight],
    rng: bool,
    members: Members,
) -> Snapshot:
    """Describe what is to be saved; tensors are views of the living ones."""
    named = name_model(model, fused)
    sink = TensorSink(named)
    parts = list(model_parts(named, with_buffers=members.rank == 0))
    extra = {name: state for name, (_, state) in named.extra.items()}
    facts: dict[str, Json] = {
        "aliases": named.aliases,
        "extra": encode(extra, "extra", sink.store),
    }
    if optimizer is not None:
        facts["optimizer"], its_parts = describe_optimizer(named, optimizer, sink.store)
        parts += its_parts
    everything = {**objects, **({RANDOM: RandomState()} if rng else {})}
    if members.size > 1 and named.buffers():
        everything[BUFFERS] = BufferState(named)
    encoded = encode_objects(everything, sink)
    return Snapshot((*parts, *sink.parts), facts, encoded)


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
    digests = {name: _digest(state) for name, state in snapshot.objects.items()}
    facts = {
        "step": step,
        "num_ranks": members.size,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "objects": members.gather(digests),
        **snapshot.facts,
    }
    try:
        write_files(
            unfinished(root, name),
            snapshot.parts,
            snapshot.objects,
            members,
            lambda files, tensors: commit(root, name, Manifest(facts, files, tensors), keep_last),
        )
    except CheckpointError:
        if members.rank == 0:
            give_up(root, name)
        raise
    return root / name


def _digest(state: Json) -> str:
    text = json.dumps(state, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class AsyncSaver:
    """Saves in the background; one save at a time.

    ``save`` copies everything to the CPU before it returns, so what is written is the state at
    that moment, whatever training does meanwhile. The copies' memory is used again by the next
    save. A context manager; leaving it waits for what is being written.
    """

    # By hand: dcp.async_save copies state dicts, and so takes uneven rows for even ones.

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Prepare to save; every rank makes one.

        Args:
            process_group: Ranks that save together; None is all.
        """
        self._members = Members.find(process_group)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._result: Path | None = None
        self._failure: BaseException | None = None
        self._memory: dict[tuple[str, tuple[int, ...]], Tensor] = {}
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
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        objects: Mapping[str, Stateful] | None = None,
        step: int | None = None,
        keep_last: int | None = None,
        fused: Sequence[FusedWeight] = (),
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
        _check_arguments(objects, step, keep_last)
        snapshot = self._members.together(
            lambda: self._copy(
                _take_snapshot(
                    model, optimizer, objects or {}, fused=fused, rng=rng, members=self._members
                )
            )
        )
        root = Path(path)
        found, name = self._members.first(lambda: begin(root, step))
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, root, name, found, keep_last), name="graphfsdp-save"
        )
        self._thread.start()

    @property
    def is_saving(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Path | None:
        """Wait until what was saved is complete.

        Returns:
            The folder of the last checkpoint; None if there was none.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
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
            self._memory.clear()
            if self._background is not self._members and self._background.group is not None:
                dist.destroy_process_group(self._background.group)
                self._background = self._members

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _copy(self, snapshot: Snapshot) -> Snapshot:
        """Copy all parts into memory on the CPU, which stays for the next save."""
        copies = []
        memory: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        on_gpu = False
        for key, part in snapshot.parts:
            local, place = part.local, (key, part.offsets)
            copy = self._memory.get(place)
            if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            memory[place] = copy.copy_(local, non_blocking=True)
            on_gpu = on_gpu or local.is_cuda
            copies.append((key, part.with_local(copy)))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self._memory = memory
        return Snapshot(tuple(copies), snapshot.facts, snapshot.objects)

    def _write(
        self, snapshot: Snapshot, root: Path, name: str, step: int, keep_last: int | None
    ) -> None:
        try:
            self._result = write_snapshot(
                snapshot, root, name, step, self._background, keep_last=keep_last
            )
        except BaseException as error:  # raised again by wait(), on the thread that asked
            self._failure = error
