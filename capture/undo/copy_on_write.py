"""Undoes an iteration on a CPU: memory as it was before the first write."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp._capture.trace.values import StorageTable, as_bytes, span, storage_of
from graphfsdp.base.op_tensors import OpCall, OperatorMode, storage_key
from graphfsdp.base.torch_internals import key_of, storage_behind
from graphfsdp.errors import CaptureError

_Range = tuple[int, int]  # first byte, byte after the last


class CopyOnWrite:
    """Old contents of everything that an iteration has written outside itself.

    A warm-up and a recording on a CPU run for real, so a failed one must be taken back; a copy is
    made only of what is written, just before, and not of ``scratch``, which nobody has seen.
    Storages are held weakly: whoever holds the memory of an iteration changes what autograd does
    with it.

    Attributes:
        free: Identities of storages that need no copy.
    """

    def __init__(self, scratch: Iterable[Tensor] = ()) -> None:
        self.free = set(map(storage_key, scratch))
        self._saved: list[tuple[StorageWeakRef, int, Tensor]] = []  # storage, first byte, contents
        self._ranges: dict[int, set[_Range]] = {}  # by identity of the storage
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copy what operators in the body are about to write, if it existed before."""
        with _UndoMode(self):
            yield

    def save(self, tensor: Tensor) -> None:
        storage = storage_of(tensor, "save")
        start, end = byte_range(tensor)
        ranges = self._ranges.setdefault(key_of(storage), set())
        if any(first <= start and end <= last for first, last in ranges):
            return
        reference = StorageWeakRef(storage)  # keeps the identity from being used again
        self._saved.append((reference, start, as_bytes(storage)[start:end].clone()))
        ranges.add((start, end))  # only when all of it is safe

    def save_generators(self, call: OpCall) -> None:
        """Keep the state of what an operator may draw from."""
        if call.is_trusted and not call.is_random:
            return
        items = (*call.args, *call.kwargs.values())
        given = [item for item in items if isinstance(item, torch.Generator)]
        for generator in given or [torch.default_generator]:
            if id(generator) not in self._generators:
                self._generators[id(generator)] = (generator, generator.get_state())

    def roll_back(self) -> None:
        # Newest first: where ranges overlap, the copy that was made first is the oldest contents.
        for reference, first, old in reversed(self._saved):
            storage = storage_behind(reference)
            if storage is not None:
                as_bytes(storage)[first : first + old.numel()].copy_(old)
        for generator, state in self._generators.values():
            generator.set_state(state)


class _UndoMode(OperatorMode):
    """Sees every operator before it runs; the modes of a recording lie inside this one."""

    joins = True

    def __init__(self, undo: CopyOnWrite) -> None:
        super().__init__()
        self._undo = undo
        self._made = StorageTable()  # by the iteration

    def on_op(self, call: OpCall) -> Any:
        for tensor in call.may_write():
            if not self._made.has(tensor) and storage_key(tensor) not in self._undo.free:
                with suppress(CaptureError):  # a sparse tensor: a recording will refuse it
                    self._undo.save(tensor)
        self._undo.save_generators(call)
        result = call.run()
        for tensor, _ in call.made(result):
            self._made.known(tensor, call.name, external=False, varies=False)
        return result


def is_undo_mode(mode: object) -> bool:
    return isinstance(mode, _UndoMode)


def byte_range(tensor: Tensor) -> _Range:
    """Return the first byte of its storage that a tensor looks at, and the one behind its last."""
    if tensor.numel() == 0:
        return (0, 0)
    start = int(tensor.storage_offset()) * tensor.element_size()
    return (start, start + span(tensor.shape, tensor.stride()) * tensor.element_size())
