"""Describes recorded operators: their kind, plain arguments, and the memory that they touch."""

import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.cpu.program_memory import ProgramMemory
from graphfsdp._capture.report.program_facts import (
    Argument,
    BufferKind,
    NodeKind,
    ProgramFacts,
    ProgramFactsBuilder,
)
from graphfsdp._capture.trace.op_tensors import RUNNING_STATISTICS, SILENT_WRITERS, draws_numbers
from graphfsdp._capture.trace.sites import Site
from graphfsdp._capture.trace.storages import span
from graphfsdp._capture.trace.values import Node, Value

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
_COLLECTIVES = ("all_gather_", "reduce_scatter_", "all_reduce_", "broadcast_", "wait_")  # ours
_COPIES = frozenset({"_to_copy", "cat", "clone", "contiguous", "copy_", "stack", "lift_fresh"})
_FILLS = frozenset({"arange", "fill_", "full", "full_like", "ones", "ones_like", "zero_", "zeros"})
_MORE_FILLS = frozenset({"empty", "empty_like", "empty_strided", "new_zeros", "scalar_tensor"})
_NUMBER_TYPES = ("number", "float", "complex", "Tensor")
_SHOWN_NUMEL = 4  # a constant tensor up to this size is shown by its values


@dataclass(frozen=True, slots=True)
class Region:
    """The memory behind a tensor argument, which stands in the tensor's place.

    Attributes:
        key: Identifies the buffer.
        kind: Whose it is, as far as is known while recording.
        num_bytes: How far into the buffer the tensor reaches.
        place: Address if it existed before the recording, or offset in the planned pool.
        text: Dtype and shape of the tensor.
    """

    key: Hashable
    kind: BufferKind
    num_bytes: int
    place: int | None
    text: str


def describe_program(
    nodes: Iterable[Node],
    sites: Sequence[Site],
    *,
    outputs: Iterable[Value],
    escapes: Iterable[Value],
    memory: ProgramMemory,
) -> ProgramFacts:
    """Describe a finished recording on a CPU; the description holds none of its objects.

    Args:
        nodes: What a replay runs, in order.
        sites: Where nodes come from, by number.
        outputs: Values of the iteration's results.
        escapes: Values that the model keeps.
        memory: Where everything lies.
    """
    builder = ProgramFactsBuilder()
    region = functools.partial(_region_of_argument, memory, memory.offsets())
    for node in nodes:
        kwargs = {name: region(value) for name, value in node.kwargs.items()}
        results = [region(value) for value in node.outputs if value is not None]
        called = not memory.needs_no_call(node)
        add_node(
            builder, node.op, region(node.args), kwargs, results, site=node.site, called=called
        )
    for value in outputs:
        builder.outlives(id(value.storage), BufferKind.OUTPUT)
    for value in escapes:
        address = value.storage.get().data_ptr()
        builder.outlives(id(value.storage), BufferKind.KEPT, address)
    return builder.build(sites, memory.plan.num_bytes)


def add_node(
    builder: ProgramFactsBuilder,
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Region],
    *,
    site: int,
    called: bool = True,
    kernels: tuple[str, ...] = (),
) -> None:
    """Append the description of one operator call.

    Args:
        builder: Collects it.
        op: The operator.
        args: Its arguments, every tensor replaced by its Region. A tensor that is left is a
            constant that the recording has made.
        kwargs: Likewise.
        results: What it returned.
        site: Number of the place that it comes from.
        called: A replay calls it; else it was over when the program was built.
        kernels: Nodes of a CUDA graph that it made.
    """

    def number(region: Region) -> int:
        return builder.buffer(
            region.key, region.kind, region.num_bytes, region.place, touches=called
        )

    reads, writes = _operands(op, args, kwargs)
    builder.node(
        str(op),
        _kind_of(op, args, kwargs),
        site,
        results=_joined(region.text for region in results),
        arguments=tuple(_plain_arguments(op, args, kwargs)),
        reads=[number(region) for region in reads],
        writes=[number(region) for region in (*writes, *(() if op.is_view else results))],
        called=called,
        kernels=kernels,
    )


def region_of(
    tensor: Tensor,
    key: Hashable,
    *,
    external: bool,
) -> Region:
    """Return the memory behind a tensor that exists.

    Args:
        tensor: The tensor.
        key: Identifies its storage.
        external: The storage existed before the recording.
    """
    offset = int(tensor.storage_offset())
    start, num_bytes = _reach(offset, tensor.shape, tensor.stride(), tensor.dtype.itemsize)
    text = _text_of(tensor.dtype, tuple(tensor.shape))
    if external:
        address = tensor.untyped_storage().data_ptr() + start
        return Region((address,), BufferKind.EXTERNAL, num_bytes, address, text)
    return Region(key, BufferKind.INTERMEDIATE, start + num_bytes, None, text)


def _joined(texts: Iterable[str]) -> str:
    counted = [(text, len(list(equal))) for text, equal in itertools.groupby(texts)]
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in counted)


def _region_of_argument(memory: ProgramMemory, planned: Mapping[int, int], item: Any) -> Any:
    if isinstance(item, list):
        return [_region_of_argument(memory, planned, member) for member in item]
    if isinstance(item, Value):
        address = memory.elided_address(item)
        return _region(item, planned.get(id(item.storage)), address)
    return item


def _region(value: Value, planned: int | None, address: int | None) -> Region:
    info = value.storage
    offset, shape, stride, dtype, *_ = value.geometry
    start, num_bytes = _reach(offset, shape, stride, dtype.itemsize)
    text = _text_of(dtype, shape)
    if info.external:
        address = info.get().data_ptr() + start
    if address is not None:
        return Region((address,), BufferKind.EXTERNAL, num_bytes, address, text)
    return Region(id(info), BufferKind.INTERMEDIATE, start + num_bytes, planned, text)


def _reach(
    offset: int, shape: Sequence[int], stride: Sequence[int], itemsize: int
) -> tuple[int, int]:
    """Return the first byte in its storage that a strided tensor touches, and how many follow."""
    return offset * itemsize, span(shape, stride) * itemsize


def _kind_of(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NodeKind:
    name = op._schema.name.partition("::")[2]
    if op.namespace in _COLLECTIVE_NAMESPACES:
        return NodeKind.COLLECTIVE
    if op.namespace == "graphfsdp" and name in _COLLECTIVES:
        return NodeKind.COLLECTIVE
    if draws_numbers(op, args, kwargs):
        return NodeKind.RANDOM
    if op.is_view:
        return NodeKind.VIEW
    if name in _COPIES:
        return NodeKind.COPY
    return NodeKind.FILL if name in _FILLS or name in _MORE_FILLS else NodeKind.COMPUTE


def _named(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Argument, Any]]:
    for index, argument in enumerate(op._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _operands(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Region], list[Region]]:
    """Return what an operator reads and what it writes of its arguments."""
    reads: list[Region] = []
    writes: list[Region] = []
    for argument, value in _named(op, args, kwargs):
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(i for i in _flat(value) if isinstance(i, Region))
    if op._schema.name in SILENT_WRITERS:
        writes.extend(item for item in args[RUNNING_STATISTICS] if item is not None)
    return reads, writes


def _plain_arguments(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Argument]:
    for argument, value in _named(op, args, kwargs):
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
