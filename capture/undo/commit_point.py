"""How far a replay on a CPU can be undone: up to the first write that nobody can put back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphfsdp._capture.trace.backend import Effect
from graphfsdp._capture.trace.values import Node, Value
from graphfsdp.base.op_tensors import written_arguments

_MAX_KEPT_BYTES = 1 << 20
_MIN_KEPT = 8
_NODES_PER_KEPT = 8  # a copy costs less than a tenth of what eight operators do
# Namespaces whose operators draw from a generator only where their tags say so.
_QUIET = ("aten", "prims", "graphfsdp", "_c10d_functional")


@dataclass(frozen=True)
class CommitPoint:
    """Where a replay can no longer be undone.

    Note [Undo of a replay]: copies of everything that an iteration writes would cost a replay as
    much time and memory as the optimizer itself. But weights and optimizer state are written at
    the end, gradients belong to an iteration that did not happen, and what else is written before
    is small: running statistics and the state of generators. These are kept, and with them every
    failure before the optimizer step is undone. After a later one the way back is a checkpoint.

    Attributes:
        node: Index of the first node that writes what is not kept; None if no node does.
    """

    node: int | None
    kept: list[Value]
    generators: list[torch.Generator]


def find_commit_point(nodes: Sequence[Node], scratch: Sequence[Tensor]) -> CommitPoint:
    """Find the first write that cannot be put back; nobody needs old contents of ``scratch``."""
    max_kept = max(_MIN_KEPT, len(nodes) // _NODES_PER_KEPT)
    free = {tensor.untyped_storage()._cdata for tensor in scratch}
    kept: dict[int, Value] = {}
    generators: dict[int, torch.Generator] = {}
    num_bytes = 0
    for index, node in enumerate(nodes):
        found: dict[int, Value] = {}
        for value in _values(written_arguments(node.op, node.args, node.kwargs)):
            info = value.storage
            if info.external and id(value) not in kept and info.get()._cdata not in free:
                found[id(value)] = value
        num_bytes += sum(map(_num_bytes, found.values()))
        if found and (num_bytes > _MAX_KEPT_BYTES or len(kept) + len(found) > max_kept):
            # None of what it writes is kept: a part of it could not undo it.
            return CommitPoint(index, list(kept.values()), list(generators.values()))
        kept.update(found)
        if torch.Tag.nondeterministic_seeded in node.op.tags or node.op.namespace not in _QUIET:
            for generator in _generators(node):
                generators[id(generator)] = generator
    return CommitPoint(None, list(kept.values()), list(generators.values()))


class ReplayUndo:
    """What a replay writes before its commit point, as it was (see Note [Undo of a replay])."""

    effect: Effect

    def __init__(self, kept: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
        self._kept = list(kept)
        self._copies = [torch.empty_like(tensor) for tensor in kept]
        self._generators = list(generators)
        self._states: list[Tensor] = []
        self._is_ready = False
        self.effect = Effect.NONE

    def begin(self) -> None:
        self.effect, self._is_ready = Effect.NONE, False
        if self._kept:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._kept)
        self._states = [generator.get_state() for generator in self._generators]
        self._is_ready = True

    def commit(self) -> None:
        """Note that from here on nothing can be put back; called before the first such write."""
        self.effect = Effect.PART

    def roll_back(self) -> None:
        if not self._is_ready or self.effect is not Effect.NONE:
            return
        if self._kept:
            torch._foreach_copy_(self._kept, self._copies)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


def _values(item: object) -> Iterator[Value]:
    if isinstance(item, Value):
        yield item
    elif isinstance(item, list):
        for inner in item:
            yield from _values(inner)


def _generators(node: Node) -> list[torch.Generator]:
    items = (*node.args, *node.kwargs.values())
    given = [item for item in items if isinstance(item, torch.Generator)]
    return given or [torch.default_generator]


def _num_bytes(value: Value) -> int:
    _, shape, _, dtype, *_ = value.geometry
    return torch.Size(shape).numel() * dtype.itemsize
