"""What a recording consists of: values, each a way to look at a storage, and nodes over them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.trace.storages import StorageInfo, span

Geometry = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]


@dataclass(eq=False, slots=True)
class Value:
    """One way to look at one storage: what a tensor of the iteration is to the program.

    Attributes:
        geometry: Offset, shape, strides, dtype, conjugate bit, negative bit.
        node: Index of the node that makes it; None if it can be made before any node runs.
    """

    storage: StorageInfo
    geometry: Geometry
    node: int | None


@dataclass(eq=False, slots=True)
class Node:
    """One operator call of the program.

    Attributes:
        args: Its arguments; every tensor replaced by its Value.
        kwargs: Likewise.
        outputs: Values of its results, in order; None for what is not a tensor.
        results: "none", "tensor" or "list": the form of what the operator returns.
        touched: Storages that it reads or writes.
        effects: It must run even when nobody uses its results.
        site: Number of the place in the user's program that it comes from.
    """

    op: torch._ops.OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Value | None]
    results: str
    touched: list[StorageInfo] = field(default_factory=list)
    effects: bool = True
    site: int = 0


def geometry_of(tensor: Tensor) -> Geometry:
    return (
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def values_in(node: Node) -> Iterable[Value]:
    yield from _values(node.args)
    yield from _values(node.kwargs.values())


def _values(items: Iterable[Any]) -> Iterable[Value]:
    # Not inside the other function: one that calls itself is a cycle, freed by the collector only.
    for item in items:
        if isinstance(item, Value):
            yield item
        elif isinstance(item, list):
            yield from _values(item)


def span_bytes(value: Value) -> int:
    """Return the bytes from the start of a value's storage to the end of the value."""
    offset, shape, stride, dtype, *_ = value.geometry
    length = span(shape, stride)
    return (offset + length) * dtype.itemsize if length else 0


def materialise(value: Value, storage: torch.UntypedStorage, first_byte: int = 0) -> Tensor:
    """Return a tensor that looks at ``storage`` as the value does at its own.

    ``first_byte`` is where the value's own storage begins in it.
    """
    offset, shape, stride, dtype, conj, neg = value.geometry
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset + first_byte // dtype.itemsize, shape, stride)
    if conj:
        tensor = tensor.conj()
    if neg:
        tensor = torch._neg_view(tensor)
    return tensor
