"""What a recorded program consists of, as frozen columns that hold no tensor.

A recording is described once, when it is made, and read rarely; so the description is a few
arrays of integers over tables of shared strings, about fifty bytes a node, and the objects that
people read (``NodeFacts``, ``BufferFacts``) are made when they ask.
"""

import enum
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from graphfsdp._capture.trace.sites import Site

_READS, _WRITES, _FLAG_BITS = 1, 2, 2
_NO_PLACE = -1

T = TypeVar("T", bound=Hashable)


class NodeKind(enum.Enum):
    """What a node does, as far as its operator tells."""

    COMPUTE = "compute"
    VIEW = "view"  # looks at memory anew; moves no data
    COPY = "copy"  # moves or converts data
    FILL = "fill"  # writes or allocates without reading
    RANDOM = "random"  # draws from a generator
    COLLECTIVE = "collective"  # waits for other ranks


class BufferKind(enum.Enum):
    """Whose memory it is."""

    EXTERNAL = "external"  # existed before the recording: weights, inputs, optimizer state
    INTERMEDIATE = "intermediate"  # lives within the iteration, in the pool
    OUTPUT = "output"  # a result of the iteration
    KEPT = "kept"  # made by the iteration and kept by the model; replays write it anew


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
    results: str
    arguments: tuple[Argument, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    called: bool
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BufferFacts:
    """One stretch of memory.

    Attributes:
        index: Number by which nodes refer to it.
        kind: Whose it is.
        num_bytes: Its size, as far as the program touches it.
        first: Index of the first node that touches it.
        last: Index of the last one, or the number of nodes where it outlives the iteration.
        address: Where it lies, if it existed before the recording or outlives it.
        offset: Byte offset in the planned pool, if there is one.
    """

    index: int
    kind: BufferKind
    num_bytes: int
    first: int
    last: int
    address: int | None
    offset: int | None


@dataclass(frozen=True, slots=True, eq=False)
class ProgramFacts:
    """The description of a recorded program; made by ``ProgramFactsBuilder``.

    Attributes:
        num_nodes: Nodes that a replay runs.
        num_buffers: Stretches of memory that they touch.
        pool_bytes: Bytes of the planned pool, 0 without one.
    """

    num_nodes: int
    num_buffers: int
    pool_bytes: int
    _sites: tuple[Site, ...]
    _ops: tuple[tuple[str, NodeKind], ...]
    _results: tuple[str, ...]
    _arguments: tuple[tuple[Argument, ...], ...]
    _kernels: tuple[tuple[str, ...], ...]
    _nodes: "array[int]"  # op, 2 * site + called, results, arguments, kernels; end of operands
    _operands: "array[int]"  # number of the buffer and two flags
    _sizes: "array[int]"
    _lives: "array[int]"  # first and last node of each buffer
    _places: "array[int]"  # address or offset
    _kinds: bytes

    @property
    def has_kernels(self) -> bool:
        """Whether the driver told which nodes of a CUDA graph operators made."""
        return any(self._kernels)

    def nodes(self) -> Iterator[NodeFacts]:
        """Yield the nodes in the order in which a replay runs them."""
        start = 0
        for index in range(self.num_nodes):
            op, site, results, arguments, kernels, end = self._nodes[6 * index : 6 * index + 6]
            operands = self._operands[start:end]
            start = end
            name, kind = self._ops[op]
            yield NodeFacts(
                index=index,
                op=name,
                kind=kind,
                site=self._sites[site >> 1],
                results=self._results[results],
                arguments=self._arguments[arguments],
                reads=tuple(o >> _FLAG_BITS for o in operands if o & _READS),
                writes=tuple(o >> _FLAG_BITS for o in operands if o & _WRITES),
                called=bool(site & 1),
                kernels=self._kernels[kernels],
            )

    def buffers(self) -> Iterator[BufferFacts]:
        """Yield the buffers by index."""
        kinds = tuple(BufferKind)
        for index in range(self.num_buffers):
            kind, place = kinds[self._kinds[index]], self._places[index]
            known = place if place != _NO_PLACE else None
            planned = kind in (BufferKind.INTERMEDIATE, BufferKind.OUTPUT)
            yield BufferFacts(
                index=index,
                kind=kind,
                num_bytes=self._sizes[index],
                first=self._lives[2 * index],
                last=self._lives[2 * index + 1],
                address=None if planned else known,
                offset=known if planned else None,
            )

    def op_counts(self) -> dict[str, int]:
        """Count the nodes by operator."""
        return dict(Counter(node.op for node in self.nodes()))

    def live_bytes(self) -> list[int]:
        """Return for each node the bytes of what the iteration has made and still needs there."""
        changes = [0] * (self.num_nodes + 2)
        for buffer in self.buffers():
            if buffer.kind is not BufferKind.EXTERNAL:
                changes[buffer.first] += buffer.num_bytes
                changes[min(buffer.last, self.num_nodes) + 1] -= buffer.num_bytes
        live, total = [], 0
        for change in changes[: self.num_nodes]:
            total += change
            live.append(total)
        return live


class _Table(Generic[T]):
    """Numbers things in the order in which they first come up."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}

    def number(self, item: T) -> int:
        return self._numbers.setdefault(item, len(self._numbers))

    def find(self, item: T) -> int | None:
        return self._numbers.get(item)

    def items(self) -> tuple[T, ...]:
        return tuple(self._numbers)


class ProgramFactsBuilder:
    """Collects nodes and buffers one by one."""

    def __init__(self) -> None:
        self._ops: _Table[tuple[str, NodeKind]] = _Table()
        self._results: _Table[str] = _Table()
        self._arguments: _Table[tuple[Argument, ...]] = _Table()
        self._kernels: _Table[tuple[str, ...]] = _Table()
        self._buffers: _Table[Hashable] = _Table()
        self._nodes = array("I")
        self._operands = array("I")
        self._sizes = array("Q")
        self._lives = array("i")
        self._places = array("q")
        self._kinds = bytearray()
        self._touched = bytearray()

    @property
    def num_nodes(self) -> int:
        """Nodes so far."""
        return len(self._nodes) // 6

    def buffer(
        self,
        key: Hashable,
        kind: BufferKind,
        num_bytes: int,
        place: int | None,
        *,
        touches: bool = True,
    ) -> int:
        """Return the number of a buffer that the next node has to do with.

        Args:
            key: Identifies it.
            kind: Whose it is; the first call decides.
            num_bytes: How far it reaches at least.
            place: Address, or offset in the planned pool.
            touches: The node reads or writes it in a replay.
        """
        number = self._buffers.number(key)
        if number == len(self._sizes):
            self._sizes.append(0)
            self._lives.extend((self.num_nodes, self.num_nodes))
            self._places.append(_NO_PLACE if place is None else place)
            self._kinds.append(tuple(BufferKind).index(kind))
            self._touched.append(0)
        self._sizes[number] = max(self._sizes[number], num_bytes)
        if touches:
            if not self._touched[number]:
                self._lives[2 * number] = self.num_nodes
                self._touched[number] = 1
            self._lives[2 * number + 1] = self.num_nodes
        return number

    def node(
        self,
        op: str,
        kind: NodeKind,
        site: int,
        *,
        results: str,
        arguments: tuple[Argument, ...],
        reads: Iterable[int],
        writes: Iterable[int],
        called: bool = True,
        kernels: tuple[str, ...] = (),
    ) -> None:
        """Append a node; what it touches was told to ``buffer`` just before."""
        flags: dict[int, int] = {}
        for numbers, flag in ((reads, _READS), (writes, _WRITES)):
            for number in numbers:
                flags[number] = flags.get(number, 0) | flag
        self._operands.extend(number << _FLAG_BITS | flag for number, flag in flags.items())
        self._nodes.extend(
            (
                self._ops.number((op, kind)),
                2 * site + called,
                self._results.number(results),
                self._arguments.number(arguments),
                self._kernels.number(kernels),
                len(self._operands),
            )
        )

    def set_kernels(self, index: int, kernels: tuple[str, ...]) -> None:
        """Say which nodes of a CUDA graph a node has made."""
        self._nodes[6 * index + 4] = self._kernels.number(kernels)

    def outlives(self, key: Hashable, kind: BufferKind, address: int | None = None) -> None:
        """Say that a buffer which the iteration made is there after it."""
        number = self._buffers.find(key)
        if number is None:
            return  # no node that is left in the program touches it
        self._lives[2 * number + 1] = self.num_nodes
        self._kinds[number] = tuple(BufferKind).index(kind)
        if kind is BufferKind.KEPT:
            self._places[number] = _NO_PLACE if address is None else address

    def build(self, sites: Sequence[Site], pool_bytes: int = 0) -> ProgramFacts:
        """Return the description; the builder is used up."""
        return ProgramFacts(
            num_nodes=self.num_nodes,
            num_buffers=len(self._sizes),
            pool_bytes=pool_bytes,
            _sites=tuple(sites),
            _ops=self._ops.items(),
            _results=self._results.items(),
            _arguments=self._arguments.items(),
            _kernels=self._kernels.items(),
            _nodes=self._nodes,
            _operands=self._operands,
            _sizes=self._sizes,
            _lives=self._lives,
            _places=self._places,
            _kinds=bytes(self._kinds),
        )
