"""What the operators of a program cost by estimate, to tell what is small beside them."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from graphfsdp._capture.trace.values import Node, Value, values_in

# Of one thread of a server's CPU. Only ratios count, and only within a factor of two or so.
_CALL_NS = 5_000.0  # an operator that is called from Python
_OWN_CALL_NS = 60_000.0  # one that is written in Python itself, such as FusedAdam's
_BYTE_NS = 0.05  # a byte that an operator reads or writes
_FLOP_NS = 0.01
_COPIED_BYTE_NS = 0.1
_CACHED_BYTE_NS = 0.05  # where all copies lie in the second cache
_CACHE_BYTES = 1 << 20
_COPY_NS = 500.0  # one of many that are made in one call
_NODES_PER_COPY = 8  # so few copies take less than a fiftieth of what the operators do
_MAX_SHARE = 1 / 20


def copies_are_cheap(num_bytes: int, num_copies: int, nodes: Sequence[Node]) -> bool:
    """Tell whether copies cost no more than about a twentieth of a replay.

    Decided from sizes alone and not by a clock, so that the same program is always treated alike.

    Args:
        num_bytes: Bytes that are copied.
        num_copies: Pieces that they are copied in.
        nodes: What a replay calls.
    """
    byte_ns = _CACHED_BYTE_NS if num_bytes <= _CACHE_BYTES else _COPIED_BYTE_NS
    num_more = max(num_copies - len(nodes) // _NODES_PER_COPY, 0)
    least_ns = (num_bytes * byte_ns + num_more * _COPY_NS) / _MAX_SHARE
    bare_ns = sum(_CALL_NS if _is_native(node) else _OWN_CALL_NS for node in nodes)
    bare_ns += _BYTE_NS * sum(_moved_bytes(node) for node in nodes)
    # Last, because torch's table of arithmetic takes a moment to import.
    return bare_ns >= least_ns or bare_ns + _FLOP_NS * _count_flops(nodes) >= least_ns


def _is_native(node: Node) -> bool:
    return node.op.namespace in ("aten", "prims", "_c10d_functional")


def _moved_bytes(node: Node) -> int:
    values = [*values_in(node), *(value for value in node.outputs if value is not None)]
    return sum(math.prod(value.geometry[1]) * value.geometry[3].itemsize for value in values)


def _count_flops(nodes: Sequence[Node]) -> int:
    from torch.utils.flop_counter import flop_registry

    total = 0
    for node in nodes:
        formula: Any = flop_registry.get(node.op._overloadpacket)
        if formula is not None:
            shapes = [_shapes(item) for item in node.args]
            named = {name: _shapes(item) for name, item in node.kwargs.items()}
            results = [_shapes(value) for value in node.outputs]
            result = results if node.results == "list" else results[0]
            total += int(formula(*shapes, **named, out_val=result))
    return total


def _shapes(item: Any) -> Any:
    """Return an argument with shapes in the place of tensors, as torch's formulas take it."""
    if isinstance(item, Value):
        return torch.Size(item.geometry[1])
    return [_shapes(inner) for inner in item] if isinstance(item, list) else item
