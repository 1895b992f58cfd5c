"""Saving while training goes on: a copy at one moment, written by a thread."""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.checkpoint.engine import Members
from graphfsdp.checkpoint.fused import FusedWeight
from graphfsdp.checkpoint.objects import Stateful
from graphfsdp.checkpoint.saving import (
    Snapshot,
    Target,
    begin_save,
    check_arguments,
    take_snapshot,
    write_snapshot,
)
from graphfsdp.errors import CheckpointError


class AsyncSaver:
    """Saves in the background; one save at a time.

    ``save`` copies everything to the CPU before it returns, so what is written is the state at
    that moment, whatever training does meanwhile. The copies' memory is used again by the next
    save. A context manager; leaving it waits for what is being written.
    """

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
        check_arguments(objects, step, keep_last)
        snapshot = self._members.together(
            lambda: self._copy(
                take_snapshot(
                    model, optimizer, objects or {}, fused=fused, rng=rng, members=self._members
                )
            )
        )
        target = begin_save(Path(path), step, keep_last, self._members)
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, target), name="graphfsdp-save"
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

    def _write(self, snapshot: Snapshot, target: Target) -> None:
        try:
            self._result = write_snapshot(snapshot, target, self._background)
        except BaseException as error:  # raised again by wait(), on the thread that asked
            self._failure = error
