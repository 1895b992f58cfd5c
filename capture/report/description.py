"""Describes recorded nodes: their kind, plain arguments, and the memory that they touch."""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphfsdp._capture.trace.program_facts import (
    Argument,
    BufferFacts,
    NodeFacts,
    NodeKind,
    ProgramFacts,
    Role,
)
from graphfsdp._capture.trace.source import Site
from graphfsdp._capture.trace.values import Node, Value, span, values_among
from graphfsdp.base.op_tensors import OpCall

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
_COLLECTIVES = frozenset(  # ours
    {"all_gather_", "reduce_scatter_", "all_reduce_", "all_to_all_", "broadcast_", "wait_"}
    | {"exchange_", "wait_exchange_"}
)
_NO_OPERATOR = "(no operator)"
_NUMBER_TYPES = ("number", "float", "complex", "Tensor")
_SHOWN_NUMEL = 4  # a constant tensor up to this size is shown by its values


T = TypeVar("T", bound=Hashable)


class Description:
    """Describes a recording when it is first asked to, and then lets go of its nodes.

    Most recordings are never looked at, and to describe one takes as long as several replays.
    """

    def __init__(
        self,
        nodes: Sequence[tuple[Node, bool]],
        sites: Sequence[Site],
        addresses: Mapping[int, int],
        *,
        offsets: Mapping[int, int] = MappingProxyType({}),
        outlives: Sequence[tuple[int, Role, int | None]] = (),
        pool_bytes: int = 0,
        kernels: Sequence[tuple[str, ...]] = (),
    ) -> None:
        """By id of the StorageInfo: ``addresses``, ``offsets`` in the pool, what ``outlives`` it.

        What has no address was made by the iteration. ``nodes`` come with whether replays call
        them: those that they do not call were over when the program was built. ``kernels``: of a
        CUDA graph, the nodes that each of them has made, and then those that none has made.
        """
        self._nodes = nodes
        self._sites = sites
        self._addresses = addresses
        self._offsets = offsets
        self._outlives = outlives
        self._pool_bytes = pool_bytes
        self._kernels = kernels
        self._buffers: list[BufferFacts] = []
        self._by_place: dict[Hashable, BufferFacts] = {}
        self._used: set[Hashable] = set()  # buffers that a replay has touched so far
        self._facts: ProgramFacts | None = None

    def __call__(self) -> ProgramFacts:
        if self._facts is None:
            self._facts = self._described()
            self._nodes = ()
        return self._facts

    def _described(self) -> ProgramFacts:
        shared: dict[Hashable, Any] = {}  # equal texts and arguments are kept once

        def share(item: T) -> T:
            kept: T = shared.setdefault(item, item)
            return kept

        found: list[NodeFacts] = []
        made = itertools.chain(self._kernels, itertools.repeat(()))
        for (node, called), kernels in zip(self._nodes, made, strict=False):
            call = OpCall(node.op, node.args, node.kwargs)
            results = [value for value in node.outputs if value is not None]
            read = (v for a, v in call.given() if a.alias_info is None or not a.alias_info.is_write)
            written = values_among(call.written_arguments())
            facts = NodeFacts(
                index=len(found),
                op=call.name,
                kind=_kind_of(call),
                site=self._sites[node.site],
                results=share(_joined(map(_text_of, results))),
                arguments=share(tuple(_plain_arguments(call))),
                reads=self._numbers(values_among(read), len(found), called),
                writes=self._numbers(
                    [*written, *(() if call.op.is_view else results)], len(found), called
                ),
                called=called,
                kernels=share(kernels),
            )
            self._name_made(facts)
            found.append(facts)
        if any(self._kernels[len(found) :]):
            last = self._sites[self._nodes[-1][0].site]
            kernels = self._kernels[len(found)]
            found.append(
                NodeFacts(len(found), _NO_OPERATOR, NodeKind.COMPUTE, last, kernels=kernels)
            )
        for key, role, address in self._outlives:
            buffer = self._by_place.get(key)
            if buffer is not None:  # else no node that is left in the program touches it
                buffer.role, buffer.last = role, len(found)
                if role is Role.KEPT:
                    buffer.address, buffer.offset = address, None
        return ProgramFacts(tuple(found), tuple(self._buffers), self._pool_bytes)

    def _name_made(self, node: NodeFacts) -> None:
        """Name what the iteration makes by the node that writes it first."""
        module = node.site.module
        for buffer in map(self._buffers.__getitem__, node.writes):
            if buffer.address is None and not buffer.name:
                buffer.name = f"{node.op} in {module}" if module else node.op

    def _numbers(self, values: Iterable[Value], node: int, called: bool) -> tuple[int, ...]:
        """Return the numbers of the buffers that a node has to do with."""
        return tuple(dict.fromkeys(self._number(value, node, called) for value in values))

    def _number(self, value: Value, node: int, called: bool) -> int:
        first, shape, stride, dtype, *_ = value.geometry
        start, num_bytes = first * dtype.itemsize, span(shape, stride) * dtype.itemsize
        key: Hashable = id(value.storage)
        begin = self._addresses.get(id(value.storage))
        if begin is None:
            num_bytes += start
        else:  # all gradients are parts of one storage
            begin += start
            key = (begin,)
        buffer = self._by_place.get(key)
        if buffer is None:
            role = Role.INTERMEDIATE if begin is None else Role.OTHER
            offset = None if begin is not None else self._offsets.get(id(value.storage))
            buffer = BufferFacts(len(self._buffers), role, "", 0, node, node, offset, begin)
            self._buffers.append(buffer)
            self._by_place[key] = buffer
        buffer.num_bytes = max(buffer.num_bytes, num_bytes)
        if called:
            if key not in self._used:
                buffer.first = node
                self._used.add(key)
            buffer.last = node
        return buffer.index


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
    return NodeKind.VIEW if op.is_view else NodeKind.COMPUTE


def _plain_arguments(call: OpCall) -> Iterator[Argument]:
    for argument, value in call.given():
        items = list(_flat(value))
        if isinstance(value, Tensor):
            yield Argument(argument.name, _constant_text(value), baked=True)
        elif value is not None and not any(isinstance(item, Value) for item in items):
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
    return f"a constant {_form_text(tensor.dtype, tuple(tensor.shape))}"


def _plain_text(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return f"a generator on {value.device}"
    if isinstance(value, torch.UntypedStorage):  # its text would be all of its contents
        return f"a storage of {value.nbytes()} bytes on {value.device}"
    return repr(value) if isinstance(value, str) else str(value).replace("torch.", "")


def _text_of(value: Value) -> str:
    _, shape, _, dtype, *_ = value.geometry
    return _form_text(dtype, shape)


def _form_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
