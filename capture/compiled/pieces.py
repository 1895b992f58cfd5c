"""Compiled stretches as nodes of a program."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from graphfsdp._capture.compiled.bounds import bound_of
from graphfsdp._capture.compiled.cutting import Cutter, Stretch
from graphfsdp._capture.compiled.stretch_graph import Bases, StretchGraph
from graphfsdp._capture.trace.values import Node, Value

_AS_STRIDED = torch.ops.aten.as_strided.default


class PieceOp:
    """What a node calls where others call an operator; only a program builder meets it."""

    namespace = "compiled"
    tags = ()

    def __init__(self, name: str, function: Any) -> None:
        self._op = function  # as of operators
        self.py_kernels: dict[Any, Any] = {}
        self._schema = SimpleNamespace(name=f"compiled::{name}", arguments=(), returns=())

    def __str__(self) -> str:
        return str(self._schema.name)


@dataclass
class Piece:
    """A stretch that can be compiled.

    Attributes:
        parts: Nodes that look at parts of older memory, which the graph is called with.
        results: What later nodes and the caller need of what it makes.
        views: Nodes that look at results, and at older memory, as later nodes do where these run
            as they were recorded.
    """

    stretch: Stretch
    graph: StretchGraph
    parts: list[Node]
    results: list[Value]
    views: list[Node]

    @property
    def bound(self) -> float:
        """How far its results may be from the recorded operators', by the dtypes in it."""
        values = (value for node in self.stretch.nodes for value in node.values)
        return bound_of(value.geometry[3] for value in values)

    def node(self, function: Any) -> Node:
        """Return the node that calls ``function`` in place of the stretch."""
        arguments: list[Any] = [[*self.graph.inputs, *self.graph.constants]]
        op: Any = PieceOp(f"nodes_{self.stretch.start}_to_{self.stretch.stop - 1}", function)
        outputs: list[Value | None] = [*self.results]
        return Node(op, arguments, {}, outputs, "list")


def find_pieces(
    nodes: Sequence[Node],
    borders: Collection[int | None],
    roots: Sequence[Value],
    refused: dict[int, str],
) -> list[Stretch | Piece]:
    """Cut a recording; what is no Piece runs as it was recorded. ``roots`` outlive it.

    ``refused`` has why a node cannot be compiled, by its id, and is added to.
    """
    bases: dict[int, tuple[Value, Node]] = {}
    for node in nodes:
        for value in node.outputs:
            if value is not None and not value.storage.external:
                bases.setdefault(id(value.storage), (value, node))
    cutter = Cutter(nodes, borders)
    while True:
        stretches = cutter.cut(refused)
        needs = _Needs(stretches, roots)
        found: list[Stretch | Piece] = []
        num_refused = len(refused)
        for index, stretch in enumerate(stretches):
            if stretch.reason:
                found.append(stretch)
                continue
            piece = _make_piece(stretch, index, needs, bases)
            refused |= piece.graph.refused
            found.append(piece)
        if len(refused) == num_refused:
            return found


class _Needs:
    """Which values are needed after a stretch."""

    def __init__(self, stretches: Sequence[Stretch], roots: Sequence[Value]) -> None:
        self._uses: list[tuple[int, Value]] = []
        for index, stretch in enumerate(stretches):
            for node in (*stretch.ahead, *stretch.nodes):
                self._uses += [(index, value) for value in node.values]
        self._uses += [(len(stretches), value) for value in roots]

    def after(self, index: int) -> list[Value]:
        return [value for at, value in self._uses if at > index]


def _make_piece(stretch: Stretch, index: int, needs: _Needs, bases: Bases) -> Piece:
    needed = needs.after(index)
    stretch.make_ahead({id(value.storage) for value in needed})
    here = {id(node) for node in stretch.nodes}
    seen = {id(value) for node in stretch.nodes for value in node.outputs if value is not None}
    results: dict[int, Value] = {}
    views: dict[int, Node] = {}
    for value in needed:
        if value.storage.external:
            continue
        base, maker = bases[id(value.storage)]
        if id(maker) in here:
            results[id(base)] = base
        if id(value) in seen and value is not base:
            views[id(value)] = _view(value, base)
    # In the order in which they are made, which is the same in equal layers.
    order = {id(value): n for n, node in enumerate(stretch.nodes) for value in node.outputs}
    outputs = sorted(results.values(), key=lambda value: order[id(value)])
    graph = StretchGraph(stretch.nodes, bases, outputs)
    parts = [_view(part, base) for part, base in graph.parts]
    return Piece(stretch, graph, parts, outputs, [*views.values()])


def _view(value: Value, base: Value) -> Node:
    offset, shape, stride, *_ = value.geometry
    arguments = [base, list(shape), list(stride), offset]
    return Node(_AS_STRIDED, arguments, {}, [value], "tensor", effects=False)
