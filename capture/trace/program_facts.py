"""What a recorded program consists of, for people: nodes and stretches of memory, no tensor."""

import enum
import itertools
from collections import Counter
from dataclasses import dataclass

from graphfsdp._capture.trace.source import Site


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
