"""Undoes an iteration on a CPU: memory as it was before the first write."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp._capture.op_tensors import flat_tensors, written_tensors
from graphfsdp._capture.storages import storage_of
from graphfsdp._capture.undo_arena import UndoArena
from graphfsdp._capture.watch_modes import OperatorMode
from graphfsdp.errors import CaptureError

_Range = tuple[int, int]  # first byte, byte after the last
# Operators of others may write what they do not declare.
_TRUSTED_NAMESPACES = ("aten", "prims", "graphfsdp", "_c10d_functional", "profiler")


class CopyOnWrite:
    """Old contents of everything that an iteration has written outside itself.

    A warm-up and a recording on a CPU run for real, so a failed one must be taken back; a copy is
    made only of what is written, just before. Storages are held weakly: whoever holds the memory
    of an iteration changes what autograd does with it.
    """

    def __init__(self) -> None:
        self._arena = UndoArena()
        self._saved: list[tuple[StorageWeakRef, int, Tensor]] = []  # storage, first byte, contents
        self._ranges: dict[int, set[_Range]] = {}  # by identity of the storage
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copy what operators in the body are about to write, if it existed before."""
        with _UndoMode(self):
            yield

    def save(self, tensor: Tensor) -> None:
        """Keep the contents of the memory that a tensor looks at and that is about to change.

        Args:
            tensor: What will be written.
        """
        storage = storage_of(tensor, "save")
        start, end = byte_range(tensor)
        ranges = self._ranges.setdefault(storage._cdata, set())
        if any(first <= start and end <= last for first, last in ranges):
            return
        reference = StorageWeakRef(storage)  # keeps the identity from being used again
        contents = _as_bytes(storage)
        first = start
        while first < end:
            piece = self._arena.take(end - first)
            piece.copy_(contents[first : first + piece.numel()])
            self._saved.append((reference, first, piece))
            first += piece.numel()
        ranges.add((start, end))  # only when all of it is safe

    def save_generators(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the state of the generators that an operator is about to draw from."""
        given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
        for generator in given or [torch.default_generator]:
            if id(generator) not in self._generators:
                self._generators[id(generator)] = (generator, generator.get_state())

    def roll_back(self) -> None:
        """Write everything back, at the addresses that it had."""
        # Newest first: where ranges overlap, the copy that was made first is the oldest contents.
        for reference, first, old in reversed(self._saved):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                _as_bytes(storage)[first : first + old.numel()].copy_(old)
        for generator, state in self._generators.values():
            generator.set_state(state)


class _UndoMode(OperatorMode):
    """Sees every operator before it runs; the modes of a recording lie inside this one."""

    def __init__(self, undo: CopyOnWrite) -> None:
        super().__init__()
        self._undo = undo
        self._made: set[int] = set()  # identities of storages that the iteration has made

    def on_op(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Copy what an operator is about to overwrite, and run it."""
        given = flat_tensors(args) + flat_tensors(kwargs.values())
        self._save(op, args, kwargs, given)
        result = op(*args, **kwargs)
        before = {_identity(tensor) for tensor in given}
        for tensor in flat_tensors([result]):
            identity = _identity(tensor)
            if identity not in before:
                self._made.add(identity)
        return result

    def _save(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
    ) -> None:
        trusted = op.namespace in _TRUSTED_NAMESPACES
        for tensor in written_tensors(op, args, kwargs) if trusted else given:
            if _identity(tensor) not in self._made:
                with suppress(CaptureError):  # a sparse tensor: a recording will refuse it
                    self._undo.save(tensor)
        if not trusted or torch.Tag.nondeterministic_seeded in op.tags:
            self._undo.save_generators(args, kwargs)


def is_undo_mode(mode: object) -> bool:
    """Tell whether a dispatch mode is the one of an iteration that can be undone."""
    return isinstance(mode, _UndoMode)


def _identity(tensor: Tensor) -> int:
    try:
        return int(storage_of(tensor, "identity")._cdata)
    except CaptureError:
        return 0


def byte_range(tensor: Tensor) -> _Range:
    """Return the first byte of its storage that a tensor looks at, and the one behind its last."""
    if tensor.numel() == 0:
        return (0, 0)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    start = int(tensor.storage_offset()) * tensor.element_size()
    return (start, start + span * tensor.element_size())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


__all__ = ["CopyOnWrite", "byte_range", "is_undo_mode"]
