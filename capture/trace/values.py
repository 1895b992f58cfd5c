"""What a program's values say: which are in a node, how many bytes they span, their tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.cpu.recorder import Node, Value


def values_in(node: Node) -> Iterable[Value]:
    """Yield the values among a node's arguments."""
    yield from _values(node.args)
    yield from _values(node.kwargs.values())


def span_bytes(value: Value) -> int:
    """Return the bytes from the start of a value's storage to the end of the value."""
    offset, shape, stride, dtype, *_ = value.geometry
    if 0 in shape:
        return 0
    steps = ((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (offset + 1 + sum(steps)) * dtype.itemsize


def _values(items: Iterable[Any]) -> Iterable[Value]:
    # Not inside the other function: one that calls itself is a cycle, freed by the collector only.
    for item in items:
        if isinstance(item, Value):
            yield item
        elif isinstance(item, list):
            yield from _values(item)


def materialise(value: Value, storage: torch.UntypedStorage, first_byte: int = 0) -> Tensor:
    """Return a tensor that looks at a storage as the value does.

    Args:
        value: The value.
        storage: Where to look.
        first_byte: Where the value's own storage begins in it.
    """
    offset, shape, stride, dtype, conj, neg = value.geometry
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset + first_byte // dtype.itemsize, shape, stride)
    if conj:
        tensor = tensor.conj()
    if neg:
        tensor = torch._neg_view(tensor)
    return tensor
