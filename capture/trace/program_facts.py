"""What a recorded program consists of, for people: nodes and stretches of memory, no tensor."""

import enum
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

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


class NodeKind(enum.Enum):
    """What a node does, as far as its operator tells."""

    COMPUTE = "compute"
    VIEW = "view"  # looks at memory anew; moves no data
    RANDOM = "random"  # draws from a generator
    COLLECTIVE = "collective"  # waits for other ranks


class Role(enum.Enum):
    """What a stretch of memory is to the training program."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    STATE = "optimizer state"
    BUFFER = "buffer"
    INPUT = "static input"
    KEPT = "kept by the model"  # made by the iteration; replays write it anew
    OTHER = "other memory from before the capture"
    INTERMEDIATE = "intermediate"  # lives within the iteration, in the pool
    OUTPUT = "result"


@dataclass(frozen=True, slots=True)
class Argument:
    """A plain argument of an operator, as text.

    Attributes:
        name: As the operator's schema has it.
        value: Its value.
        baked: A number that takes part in the arithmetic (not a size, a dim, a flag), which
            every replay uses again.
    """

    name: str
    value: str
    baked: bool

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node.

    Attributes:
        index: Position in the program.
        op: Name of the operator.
        kind: What it does.
        site: Phase, module and source line.
        results: Dtype and shape of what it returns.
        arguments: Its plain arguments.
        reads: Buffers that it reads, by index.
        writes: Buffers that it writes.
        called: A replay calls it. On a CPU, views and constants are made once, with the program.
        kernels: Nodes of the CUDA graph that it made, by name; empty on a CPU.
    """

    index: int
    op: str
    kind: NodeKind
    site: Site
    results: str = ""
    arguments: tuple[Argument, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    called: bool = True
    kernels: tuple[str, ...] = ()


@dataclass(slots=True)
class BufferFacts:
    """One stretch of memory.

    Attributes:
        index: Number by which nodes refer to it.
        role: What it is to the training program; OTHER for all from before the recording, as long
            as nobody has asked whose it is.
        name: Full name; for what the iteration makes, the operator that makes it.
        num_bytes: Its size, as far as the program touches it.
        first: Index of the first node that touches it.
        last: Index of the last one, or the number of nodes where it outlives the iteration.
        offset: Byte offset in the planned pool, None where there is none.
        address: Where it lies, if it existed before the recording or outlives it.
    """

    index: int
    role: Role
    name: str
    num_bytes: int
    first: int
    last: int
    offset: int | None
    address: int | None


@dataclass(frozen=True, slots=True, eq=False)
class ProgramFacts:
    """The description of a recorded program.

    Attributes:
        nodes: In the order in which a replay runs them.
        buffers: The memory that they touch.
        pool_bytes: Bytes of the planned pool, 0 without one.
    """

    nodes: tuple[NodeFacts, ...]
    buffers: tuple[BufferFacts, ...]
    pool_bytes: int

    @property
    def has_kernels(self) -> bool:
        """Whether the driver told which nodes of a CUDA graph operators made."""
        return any(node.kernels for node in self.nodes)

    def op_counts(self) -> dict[str, int]:
        return dict(Counter(node.op for node in self.nodes))

    @property
    def peak_bytes(self) -> int:
        """The most bytes of what the iteration has made that are needed at one time."""
        return max(self.live_bytes(), default=0)

    def live_bytes(self) -> list[int]:
        """Return for each node the bytes of what the iteration has made and still needs there."""
        changes = [0] * (len(self.nodes) + 2)
        for buffer in self.buffers:
            if buffer.role is not Role.OTHER:
                changes[buffer.first] += buffer.num_bytes
                changes[min(buffer.last, len(self.nodes)) + 1] -= buffer.num_bytes
        return list(itertools.accumulate(changes))[: len(self.nodes)]


@dataclass(eq=False)
class Description:
    """Describes a recording when it is first asked to, and then lets go of its nodes.

    Most recordings are never looked at, and to describe one takes as long as several replays.

    Attributes:
        nodes: With whether replays call them: those that they do not call were over when the
            program was built.
        addresses: By id of the StorageInfo, as offsets and outlives are. What has none was made by
            the iteration.
        offsets: In the pool.
        outlives: What is there behind a replay, what it is, and where.
        kernels: Of a CUDA graph, the nodes that each node has made, and then those that none has.
    """

    nodes: Sequence[tuple[Node, bool]]
    sites: Sequence[Site]
    addresses: Mapping[int, int]
    offsets: Mapping[int, int] = field(default_factory=dict)
    outlives: Sequence[tuple[int, Role, int | None]] = ()
    pool_bytes: int = 0
    kernels: Sequence[tuple[str, ...]] = ()
    _buffers: list[BufferFacts] = field(init=False, default_factory=list)
    _by_place: dict[Hashable, BufferFacts] = field(init=False, default_factory=dict)
    _used: set[Hashable] = field(init=False, default_factory=set)  # what a replay touches so far
    _facts: ProgramFacts | None = field(init=False, default=None)

    def __call__(self) -> ProgramFacts:
        if self._facts is None:
            self._facts = self._described()
            self.nodes = ()
        return self._facts

    def _described(self) -> ProgramFacts:
        shared: dict[Hashable, Any] = {}  # equal texts and arguments are kept once

        def share(item: T) -> T:
            kept: T = shared.setdefault(item, item)
            return kept

        found: list[NodeFacts] = []
        made = itertools.chain(self.kernels, itertools.repeat(()))
        for (node, called), kernels in zip(self.nodes, made, strict=False):
            call = node.call
            read = (v for a, v in call.given() if a.alias_info is None or not a.alias_info.is_write)
            facts = NodeFacts(
                index=len(found),
                op=call.name,
                kind=_kind_of(call),
                site=self.sites[node.site],
                results=share(_joined(map(_text_of, node.made))),
                arguments=share(tuple(_plain_arguments(call))),
                reads=self._numbers(values_among(read), len(found), called),
                writes=self._numbers(
                    [*node.written, *(() if call.op.is_view else node.made)], len(found), called
                ),
                called=called,
                kernels=share(kernels),
            )
            self._name_made(facts)
            found.append(facts)
        if any(self.kernels[len(found) :]):
            last = self.sites[self.nodes[-1][0].site]
            kernels = self.kernels[len(found)]
            found.append(
                NodeFacts(len(found), _NO_OPERATOR, NodeKind.COMPUTE, last, kernels=kernels)
            )
        for key, role, address in self.outlives:
            buffer = self._by_place.get(key)
            if buffer is not None:  # else no node that is left in the program touches it
                buffer.role, buffer.last = role, len(found)
                if role is Role.KEPT:
                    buffer.address, buffer.offset = address, None
        return ProgramFacts(tuple(found), tuple(self._buffers), self.pool_bytes)

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
        begin = self.addresses.get(id(value.storage))
        if begin is None:
            num_bytes += start
        else:  # all gradients are parts of one storage
            begin += start
            key = (begin,)
        buffer = self._by_place.get(key)
        if buffer is None:
            role = Role.INTERMEDIATE if begin is None else Role.OTHER
            offset = None if begin is not None else self.offsets.get(id(value.storage))
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
