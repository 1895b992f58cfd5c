"""What a captured step consists of: numbers, nodes, memory; for people, files and browsers."""

import enum
import html
import importlib.resources
import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from graphfsdp._capture.trace.program_facts import BufferFacts, NodeFacts, ProgramFacts, Role
from graphfsdp._capture.trace.values import span
from graphfsdp.base.dtensors import local_part
from graphfsdp.errors import PhaseError, SourceLine

OUTSIDE = "(outside any module)"
ROOT = "(root module)"
_PAGE_PARTS = ("page.css", "page.js")
PathLike = str | os.PathLike[str]


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


@dataclass(frozen=True)
class CaptureReport:
    """Facts of one captured step; ``str(report)`` is for people.

    Attributes:
        backend: "cpu" or "cuda".
        scope: How much of the iteration is in the graph.
        phase: What the next call does.
        num_calls: Calls so far, by what they did: warm-up, capture, replay, eager.
        num_captures: Successful captures.
        num_nodes: Nodes of the graph; None before the capture, or where the driver is silent.
        num_ops: Operator calls of the recorded iteration.
        op_counts: Recorded calls by operator name.
        capture_ms: Milliseconds that the capture took; None before it.
        warmup_ms: Milliseconds that all warm-ups took.
        static_input_bytes: Bytes of the static inputs.
        gradient_bytes: Bytes of the persistent gradient buffers.
        pool_bytes: Bytes of the graph's private memory pool; on a CPU of its planned memory.
        num_escapes: Tensors that the model kept from the recorded iteration; replays update them.
        inputs: Every leaf of the batch and its metadata.
        without_gradient: Trainable parameters that no gradient reached; the optimizer skips them.
        compiled: What was compiled and what runs as it was recorded, in words; empty if nothing
            was asked for.
        program: Every node and stretch of memory of the graph; None before the capture.
        names: Whose memory it is.
    """

    backend: str
    scope: str
    phase: str
    num_calls: Mapping[str, int]
    num_captures: int
    num_nodes: int | None = None
    num_ops: int | None = None
    op_counts: Mapping[str, int] = field(default_factory=dict)
    capture_ms: float | None = None
    warmup_ms: float = 0.0
    static_input_bytes: int = 0
    gradient_bytes: int = 0
    pool_bytes: int = 0
    num_escapes: int = 0
    inputs: Mapping[str, str] = field(default_factory=dict)
    without_gradient: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    program: ProgramFacts | None = field(default=None, repr=False)
    names: MemoryNames | None = field(default=None, repr=False)

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Return every node in the order in which a replay runs them.

        On CUDA a node is an operator call of the iteration, with the graph's nodes that it made.
        """
        return self._facts.nodes

    @property
    def _facts(self) -> ProgramFacts:
        return self.program or ProgramFacts((), (), 0)

    def buffers(self) -> tuple[BufferFacts, ...]:
        """Return every stretch of memory that the graph touches, and when."""
        names = self.names or MemoryNames(())
        return tuple(_named(buffer, names) for buffer in self._facts.buffers)

    @property
    def baked_constants(self) -> tuple[BakedConstant, ...]:
        """Numbers that the recording took from Python: a replay never reads them anew."""
        return _baked_constants(self._facts)

    @property
    def by_kind(self) -> Mapping[str, Mapping[str, int]]:
        """Nodes of the graph, counted by kind.

        On a CPU these are operators by what they do: compute, view, random, collective. On CUDA
        they are the graph's nodes by type: kernel, memcpy, memset.
        """
        return _count_kinds(self._facts)

    @property
    def by_phase(self) -> Mapping[str, Mapping[str, int]]:
        """Operators or kernels, counted by "forward", "backward" and "optimizer"."""
        return _count_nodes(self._facts, lambda node: node.site.phase.value)

    @property
    def by_module(self) -> Mapping[str, Mapping[str, int]]:
        """Operators or kernels, counted by full name of the module, backward passes included."""
        return _count_nodes(self._facts, _module_of)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, strings and numbers."""
        derived = ("program", "names")
        own = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in derived}
        return own | {
            "by_kind": _plain(self.by_kind),
            "by_phase": _plain(self.by_phase),
            "by_module": _plain(self.by_module),
            "baked_constants": _plain(self.baked_constants),
            "nodes": [_node_data(node) for node in self.nodes()],
            "buffers": [_buffer_data(buffer) for buffer in self.buffers()],
            "live_bytes": self._facts.live_bytes(),
        }

    def to_json(self, path: PathLike | None = None, *, indent: int | None = None) -> str:
        """Return ``to_dict`` as JSON, and write it to a file if one is given."""
        text = json.dumps(self.to_dict(), indent=indent)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def html(self, path: PathLike) -> None:
        """Write one page that needs no network: timeline, memory over time, table of nodes.

        Raises:
            PhaseError: nothing has been captured yet.
        """
        if self.program is None:
            raise PhaseError(
                f"there is no graph to make a page of: phase {self.phase}, scope {self.scope}, "
                f"{self.num_captures} captures. Remedy: call the step until it has captured "
                "(warmup_steps + 1 calls), with a scope other than 'none'"
            )
        folder = importlib.resources.files("graphfsdp._capture.report") / "page"
        page = (folder / "page.html").read_text(encoding="utf-8")
        for part in _PAGE_PARTS:
            page = page.replace(f"@@{part}@@", (folder / part).read_text(encoding="utf-8"))
        # "</script>" and "<!--" inside a string would end the script element.
        report = self.to_dict()
        data = json.dumps(report, separators=(",", ":")).replace("<", "\\u003c")
        title = html.escape(f"graphfsdp: {report['num_nodes']} nodes, {self.scope}")
        page = page.replace("@@title@@", title).replace("@@data@@", data)
        Path(path).write_text(page, encoding="utf-8")

    def __str__(self) -> str:
        calls = ", ".join(f"{count} {name}" for name, count in self.num_calls.items() if count)
        lines = [
            f"captured step: backend {self.backend}, scope {self.scope}, phase {self.phase}",
            f"  calls:             {calls or 'none yet'}",
        ]
        if self.num_captures:
            lines += self._graph_lines()
        for index, line in enumerate(self.compiled):
            lines.append(f"  {'' if index else 'compiled:':<18} {line}")
        lines.append(f"  static inputs:     {self.static_input_bytes:,} bytes")
        lines.append(f"  gradient buffers:  {self.gradient_bytes:,} bytes")
        if self.pool_bytes or self.backend == "cuda":
            lines.append(f"  private pool:      {self.pool_bytes:,} bytes")
        if self.without_gradient:
            lines.append(f"  without gradient:  {', '.join(self.without_gradient)}")
        return "\n".join(lines)

    def _graph_lines(self) -> list[str]:
        nodes = "unknown" if self.num_nodes is None else str(self.num_nodes)
        lines = [
            f"  graph:             {nodes} nodes from {self.num_ops} operator calls, "
            f"captured in {self.capture_ms:.0f} ms"
        ]
        phases = {name: sum(counts.values()) for name, counts in self.by_phase.items()}
        if phases:
            text = ", ".join(f"{count} {name}" for name, count in phases.items())
            lines.append(f"  by phase:          {text}")
        if self.op_counts:
            top = sorted(self.op_counts.items(), key=lambda pair: -pair[1])[:5]
            text = ", ".join(f"{count} {name}" for name, count in top)
            lines.append(f"  most frequent:     {text}")
        if self.program is not None:
            lines.append(f"  intermediates:     {self.program.peak_bytes:,} bytes at one time")
            lines.append(f"  baked numbers:     {len(self.baked_constants)} (baked_constants)")
        lines.append(f"  kept by the model: {self.num_escapes} tensors, updated by replays")
        return lines


def _baked_constants(program: ProgramFacts) -> tuple[BakedConstant, ...]:
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


def _count_nodes(
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


def _count_kinds(program: ProgramFacts) -> Mapping[str, Mapping[str, int]]:
    """Count the graph's nodes by type where the driver told them, else operators by kind."""
    counts: dict[str, Counter[str]] = {}
    for node in program.nodes:
        for item in node.kernels:
            kind, _, name = item.partition(" ")
            counts.setdefault(kind, Counter())[name or kind] += 1
    return counts or _count_nodes(program, lambda node: node.kind.value)


def _module_of(node: NodeFacts) -> str:
    """Return the full name of a node's module, in words where it has none."""
    module = node.site.module
    return OUTSIDE if module is None else module or ROOT


def _named(buffer: BufferFacts, names: MemoryNames) -> BufferFacts:
    """Return the facts with the name of what was there before."""
    if buffer.address is None:
        return buffer
    role, name = names.find(buffer.address, buffer.num_bytes)
    if buffer.role is Role.KEPT:
        return buffer if role is Role.OTHER else replace(buffer, name=name)
    return replace(buffer, role=role, name=name)


def _node_data(node: NodeFacts) -> dict[str, Any]:
    site = {name: _plain(getattr(node.site, name)) for name in ("phase", "module", "source")}
    data: dict[str, Any] = _plain(node) | site
    del data["site"]
    data["arguments"] = ", ".join(map(str, node.arguments))
    if not node.kernels:
        del data["kernels"]
    return data


def _buffer_data(buffer: BufferFacts) -> dict[str, Any]:
    data: dict[str, Any] = _plain(buffer)
    del data["address"]
    return data | {"bytes": data.pop("num_bytes")}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
