"""Summaries of a recorded program: memory by owner, baked numbers, counts."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from graphfsdp._capture.trace.program_facts import BufferFacts, NodeFacts, ProgramFacts, Role
from graphfsdp._capture.trace.values import span
from graphfsdp.base.dtensors import local_part
from graphfsdp.errors import SourceLine

OUTSIDE = "(outside any module)"
ROOT = "(root module)"


@dataclass(frozen=True, slots=True)
class BakedConstant:
    """A Python number, or a small constant tensor, that every replay uses again.

    Attributes:
        value: The number, or the tensor's contents or shape.
        op: Operator that takes it.
        argument: Name of the argument.
        phase: "forward", "backward" or "optimizer".
        module: Full name of the module, "" for the root, None outside any.
        source: The user's line; None inside autograd's own work.
        num_nodes: Nodes that take it there.
    """

    value: str
    op: str
    argument: str
    phase: str
    module: str | None
    source: SourceLine | None
    num_nodes: int

    def __str__(self) -> str:
        where = self.source or (OUTSIDE if self.module is None else self.module or ROOT)
        return f"{self.argument}={self.value} of {self.op} at {where}"


@dataclass(frozen=True, slots=True)
class _NamedMemory:
    """A tensor's memory, by address; ``end`` is behind its last byte."""

    start: int
    end: int
    role: Role
    name: str


class MemoryNames:
    """Finds who owns an address. Holds integers and strings, no tensor."""

    def __init__(self, tensors: Iterable[tuple[Role, str, Tensor]]) -> None:
        """Of two tensors at one address the first counts."""
        found: dict[tuple[int, int], _NamedMemory] = {}
        for role, name, tensor in tensors:
            local = local_part(tensor)
            if local.numel() == 0:
                continue
            start = local.data_ptr()
            end = start + span(local.shape, local.stride()) * local.element_size()
            found.setdefault((start, end), _NamedMemory(start, end, role, name))
        self._items = sorted(found.values(), key=lambda item: (item.start, -item.end))
        self._starts = [item.start for item in self._items]

    def find(self, address: int, num_bytes: int) -> tuple[Role, str]:
        """Return role and name; several neighbours are counted, and the first is named."""
        first = max(bisect_right(self._starts, address) - 1, 0)
        inside = [
            item
            for item in self._items[first : bisect_right(self._starts, address + num_bytes)]
            if item.start < address + num_bytes and address < item.end
        ]
        if not inside:
            return Role.OTHER, ""
        item = inside[0]
        if len(inside) > 1:
            return item.role, f"{item.name} and {len(inside) - 1} more behind it"
        whole = item.start == address and item.end <= address + num_bytes
        return item.role, item.name if whole else f"part of {item.name}"


def baked_constants(program: ProgramFacts) -> tuple[BakedConstant, ...]:
    """Return the numbers that the program takes from Python, equal ones of one line merged."""
    counts: Counter[BakedConstant] = Counter()
    for node in program.nodes:
        for argument in node.arguments:
            if argument.baked:
                site = node.site
                key = BakedConstant(
                    *(argument.value, node.op, argument.name, site.phase.value),
                    *(site.module, site.source, 1),
                )
                counts[key] += 1
    return tuple(replace(constant, num_nodes=count) for constant, count in counts.items())


def named_buffers(program: ProgramFacts, names: MemoryNames) -> tuple[BufferFacts, ...]:
    """Return the memory that the program touches, with the names of what was there before."""
    return tuple(_named(buffer, names) for buffer in program.buffers)


def count_nodes(
    program: ProgramFacts, key: Callable[[NodeFacts], str]
) -> Mapping[str, Mapping[str, int]]:
    """Count operators, or kernels where the program has them, by some property of their node."""
    counts: dict[str, Counter[str]] = {}
    has_kernels = program.has_kernels  # which looks at all of them
    for node in program.nodes:
        counted = node.kernels if has_kernels else (node.op,)
        if counted:
            counts.setdefault(key(node), Counter()).update(counted)
    return counts


def count_kinds(program: ProgramFacts) -> Mapping[str, Mapping[str, int]]:
    """Count the graph's nodes by type where the driver told them, else operators by kind."""
    counts: dict[str, Counter[str]] = {}
    for node in program.nodes:
        for item in node.kernels:
            kind, _, name = item.partition(" ")
            counts.setdefault(kind, Counter())[name or kind] += 1
    return counts or count_nodes(program, lambda node: node.kind.value)


def module_of(node: NodeFacts) -> str:
    """Return the full name of a node's module, in words where it has none."""
    module = node.site.module
    return OUTSIDE if module is None else module or ROOT


def _named(buffer: BufferFacts, names: MemoryNames) -> BufferFacts:
    if buffer.address is None:
        return buffer
    role, name = names.find(buffer.address, buffer.num_bytes)
    if buffer.role is Role.KEPT:
        return buffer if role is Role.OTHER else replace(buffer, name=name)
    return replace(buffer, role=role, name=name)
