"""Describes recorded operators: their kind, plain arguments, and the memory that they touch."""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphfsdp._capture.trace.program_facts import (
    Argument,
    BufferFacts,
    BufferKind,
    NodeFacts,
    NodeKind,
    ProgramFacts,
)
from graphfsdp._capture.trace.source import Site
from graphfsdp._capture.trace.values import span
from graphfsdp.base.op_tensors import OpCall

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
_COLLECTIVES = frozenset(  # ours
    {"all_gather_", "reduce_scatter_", "all_reduce_", "all_to_all_", "broadcast_", "wait_"}
    | {"exchange_", "wait_exchange_"}
)
_COPIES = frozenset({"_to_copy", "cat", "clone", "contiguous", "copy_", "stack", "lift_fresh"})
_FILLS = frozenset({"arange", "fill_", "full", "full_like", "ones", "ones_like", "zero_", "zeros"})
_MORE_FILLS = frozenset({"empty", "empty_like", "empty_strided", "new_zeros", "scalar_tensor"})
_NO_OPERATOR = "(no operator)"
_NUMBER_TYPES = ("number", "float", "complex", "Tensor")
_SHOWN_NUMEL = 4  # a constant tensor up to this size is shown by its values


T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Region:
    """The memory behind a tensor argument, which stands in the tensor's place.

    Attributes:
        key: Identifies the buffer.
        text: Dtype and shape of the tensor.
        num_bytes: How far into the buffer the tensor reaches.
        address: Where the buffer lies, if it existed before the recording.
        offset: Where it lies in the planned pool, if it does.
    """

    key: Hashable
    text: str
    num_bytes: int
    address: int | None
    offset: int | None


class Description:
    """Collects a recording's operator calls one by one; holds no tensor."""

    def __init__(self) -> None:
        self._nodes: list[dict[str, Any]] = []  # NodeFacts, with the number of their site
        self._buffers: dict[Hashable, BufferFacts] = {}
        self._used: set[Hashable] = set()  # buffers that a replay has touched so far
        self._shared: dict[Hashable, Any] = {}  # equal texts and arguments are kept once

    def add(
        self, call: OpCall, results: Sequence[Region], *, site: int, called: bool = True
    ) -> None:
        """Append an operator call, every tensor replaced by its Region.

        A tensor that is left is a constant that the recording has made. ``called``: a replay calls
        it; else it was over when the program was built.
        """
        reads, writes = _operands(call)
        written = (*writes, *(() if call.op.is_view else results))
        self._nodes.append(
            {
                "op": call.name,
                "kind": _kind_of(call),
                "site": site,
                "results": self._share(_joined(region.text for region in results)),
                "arguments": self._share(tuple(_plain_arguments(call))),
                "reads": self._numbers(reads, called),
                "writes": self._numbers(written, called),
                "called": called,
            }
        )

    def add_kernels(self, ends: Sequence[int], names: Sequence[str], last_site: int) -> None:
        """Say which nodes of a CUDA graph the operators have made.

        ``ends`` has the number of nodes after each operator; ``last_site`` is for those behind all.
        """
        start = 0
        for node, end in zip(self._nodes, ends, strict=True):
            node["kernels"] = self._share(tuple(names[start:end]))
            start = max(end, start)
        if names[start:]:
            rest = {"op": _NO_OPERATOR, "kind": NodeKind.COMPUTE, "site": last_site}
            self._nodes.append(rest | {"kernels": tuple(names[start:])})

    def outlives(self, key: Hashable, kind: BufferKind, address: int | None = None) -> None:
        """Say that a buffer which the iteration made is there after it."""
        buffer = self._buffers.get(key)
        if buffer is None:
            return  # no node that is left in the program touches it
        buffer.kind, buffer.last = kind, len(self._nodes)
        if kind is BufferKind.KEPT:
            buffer.address, buffer.offset = address, None

    def facts(self, sites: Sequence[Site], pool_bytes: int = 0) -> ProgramFacts:
        nodes = (
            NodeFacts(index=index, **node | {"site": sites[node["site"]]})
            for index, node in enumerate(self._nodes)
        )
        return ProgramFacts(tuple(nodes), tuple(self._buffers.values()), pool_bytes)

    def _share(self, item: T) -> T:
        shared: T = self._shared.setdefault(item, item)
        return shared

    def _numbers(self, regions: Iterable[Region], called: bool) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._number(region, called) for region in regions))

    def _number(self, region: Region, called: bool) -> int:
        """Return the number of a buffer that the next node has to do with."""
        now = len(self._nodes)
        buffer = self._buffers.get(region.key)
        if buffer is None:
            kind = BufferKind.INTERMEDIATE if region.address is None else BufferKind.EXTERNAL
            buffer = self._buffers[region.key] = BufferFacts(
                len(self._buffers), kind, 0, now, now, region.address, region.offset
            )
        buffer.num_bytes = max(buffer.num_bytes, region.num_bytes)
        if called:
            if region.key not in self._used:
                buffer.first = now
                self._used.add(region.key)
            buffer.last = now
        return buffer.index


def region_of(
    tensor: Tensor,
    key: Hashable,
    *,
    external: bool,
) -> Region:
    """``key`` identifies the storage; ``external``: it existed before the recording."""
    address = tensor.untyped_storage().data_ptr() if external else None
    offset = int(tensor.storage_offset())
    return region(key, tensor.dtype, offset, tensor.shape, tensor.stride(), address)


def region(
    key: Hashable,
    dtype: torch.dtype,
    first: int,
    shape: Sequence[int],
    stride: Sequence[int],
    address: int | None,
    offset: int | None = None,
) -> Region:
    """Return the memory behind a tensor.

    ``first`` is its offset in the storage ``key``, in elements; ``address`` that of a storage from
    before the recording; ``offset`` that of one that lies in the planned pool.
    """
    start, num_bytes = first * dtype.itemsize, span(shape, stride) * dtype.itemsize
    text = _text_of(dtype, shape)
    if address is not None:
        return Region((address + start,), text, num_bytes, address + start, None)
    return Region(key, text, start + num_bytes, None, offset)


def _joined(texts: Iterable[str]) -> str:
    counted = [(text, len(list(equal))) for text, equal in itertools.groupby(texts)]
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in counted)


def _kind_of(call: OpCall) -> NodeKind:
    op, name = call.op, call.schema_name.partition("::")[2]
    if op.namespace in _COLLECTIVE_NAMESPACES:
        return NodeKind.COLLECTIVE
    if op.namespace == "graphfsdp" and name in _COLLECTIVES:
        return NodeKind.COLLECTIVE
    if call.draws_numbers():
        return NodeKind.RANDOM
    if op.is_view:
        return NodeKind.VIEW
    if name in _COPIES:
        return NodeKind.COPY
    return NodeKind.FILL if name in _FILLS or name in _MORE_FILLS else NodeKind.COMPUTE


def _operands(call: OpCall) -> tuple[list[Region], list[Region]]:
    """Return what it reads, and what it writes."""
    read = (v for a, v in call.given() if a.alias_info is None or not a.alias_info.is_write)
    found = (_flat(list(read)), _flat(call.written_arguments()))
    reads, writes = ([item for item in items if isinstance(item, Region)] for items in found)
    return reads, writes


def _plain_arguments(call: OpCall) -> Iterator[Argument]:
    for argument, value in call.given():
        items = list(_flat(value))
        if isinstance(value, Tensor):
            yield Argument(argument.name, _constant_text(value), baked=True)
        elif value is not None and not any(isinstance(item, Region) for item in items):
            kind = str(argument.type).removeprefix("Optional[").removeprefix("List[").rstrip("]")
            numeric = all(isinstance(item, int | float | complex) for item in items)
            flags = all(isinstance(item, bool) for item in items)
            baked = numeric and not flags and kind in _NUMBER_TYPES
            yield Argument(argument.name, _plain_text(value), baked)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _constant_text(tensor: Tensor) -> str:
    if tensor.numel() <= _SHOWN_NUMEL:
        return str(tensor.tolist())
    return f"a constant {_text_of(tensor.dtype, tuple(tensor.shape))}"


def _plain_text(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return f"a generator on {value.device}"
    if isinstance(value, torch.UntypedStorage):  # its text would be all of its contents
        return f"a storage of {value.nbytes()} bytes on {value.device}"
    return repr(value) if isinstance(value, str) else str(value).replace("torch.", "")


def _text_of(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
