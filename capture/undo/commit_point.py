"""How far a replay on a CPU can be undone: up to the first write that nobody can put back."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphfsdp._capture.trace.op_tensors import written_arguments
from graphfsdp._capture.trace.storages import StorageInfo
from graphfsdp._capture.trace.values import Node, Value

_MAX_KEPT_BYTES = 1 << 20
_MIN_KEPT = 8
_NODES_PER_KEPT = 8  # a copy costs less than a tenth of what eight operators do


@dataclass(frozen=True)
class CommitPoint:
    """Where a replay can no longer be undone.

    Note [Undo of a replay]: copies of everything that an iteration writes would cost a replay as
    much time and memory as the optimizer itself. But weights and optimizer state are written at
    the end, gradients belong to an iteration that did not happen, and what else is written before
    is small: running statistics and the state of generators. These are kept, and with them every
    failure before the optimizer step is undone. What the optimizer writes is copied too where
    that is cheap beside the rest (see Note [Late copies]). Who wants every replay undone pays for
    it (``undo_replays=True``).

    Attributes:
        node: Index of the first node that writes what is not kept; None if no node does.
        kept: What small tensors the nodes before it write.
        generators: What generators they draw from.
    """

    node: int | None
    kept: list[Value]
    generators: list[torch.Generator]


def find_commit_point(nodes: Sequence[Node], scratch: Sequence[Tensor]) -> CommitPoint:
    """Find the first write that a failed replay could not put back.

    Args:
        nodes: The program.
        scratch: Tensors whose old contents nobody needs.
    """
    max_kept = max(_MIN_KEPT, len(nodes) // _NODES_PER_KEPT)
    return _scan(nodes, scratch, _MAX_KEPT_BYTES, max_kept)


def find_everything_written(nodes: Sequence[Node], scratch: Sequence[Tensor] = ()) -> CommitPoint:
    """Return what a replay writes and draws from in all, with a commit point behind its end.

    Args:
        nodes: The program.
        scratch: Tensors whose old contents nobody needs.
    """
    return _scan(nodes, scratch, math.inf, math.inf)


def _scan(
    nodes: Sequence[Node], scratch: Sequence[Tensor], max_bytes: float, max_kept: float
) -> CommitPoint:
    free = {tensor.untyped_storage()._cdata for tensor in scratch}
    kept: dict[int, Value] = {}
    generators: dict[int, torch.Generator] = {}
    num_bytes = 0
    for index, node in enumerate(nodes):
        found: dict[int, Value] = {}
        for value in _values(written_arguments(node.op, node.args, node.kwargs)):
            info = value.storage
            if info.external and id(value) not in kept and _identity(info) not in free:
                found[id(value)] = value
        num_bytes += sum(map(_num_bytes, found.values()))
        if found and (num_bytes > max_bytes or len(kept) + len(found) > max_kept):
            # None of what it writes is kept: a part of it could not undo it.
            return CommitPoint(index, list(kept.values()), list(generators.values()))
        kept.update(found)
        if torch.Tag.nondeterministic_seeded in node.op.tags or node.op.namespace not in _QUIET:
            for generator in _generators(node):
                generators[id(generator)] = generator
    return CommitPoint(None, list(kept.values()), list(generators.values()))


# Namespaces whose operators draw from a generator only where their tags say so.
_QUIET = ("aten", "prims", "graphfsdp", "_c10d_functional")


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


def _identity(info: StorageInfo) -> int:
    return int(info.get()._cdata)


def _num_bytes(value: Value) -> int:
    _, shape, _, dtype, *_ = value.geometry
    return torch.Size(shape).numel() * dtype.itemsize
