"""Cuts a recording into pieces that are compiled and nodes that run as they were recorded."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphfsdp._capture.compiled.bounds import bound_of
from graphfsdp._capture.compiled.stretch_graph import Bases, StretchGraph
from graphfsdp._capture.trace.values import Node, Value
from graphfsdp.base.op_tensors import is_empty
from graphfsdp.base.torch_internals import schema_of

# A call of a compiled piece costs about as much as so many operators.
_FEWEST = 4
_FEWEST_OF_LAYER = 16  # what is smaller compiles fast enough, and calls would cost
_DRAWS = "draws random numbers"
_EMPTY = torch.ops.aten.empty_strided.default
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
    """Nodes that follow one another.

    Attributes:
        start: Index in the recording of the first of them, those ahead included.
        nodes: The nodes that are compiled, or the one that is not.
        ahead: Nodes that run as recorded before ``nodes``, those that draw and those that make
            memory: see Note [Random numbers] and ``_make_ahead``.
        reason: Why it runs as it was recorded; "" if it can be compiled, and has what follows.
        graph: What is compiled.
        parts: Nodes that look at parts of older memory, which the graph is called with.
        results: What later nodes and the caller need of what it makes.
        views: Nodes that look at results, and at older memory, as later nodes do where these run
            as they were recorded.
    """

    start: int
    nodes: list[Node]
    ahead: list[Node] = field(default_factory=list)
    reason: str = ""
    graph: StretchGraph = field(init=False)
    parts: list[Node] = field(init=False)
    results: list[Value] = field(init=False)
    views: list[Node] = field(init=False)

    @property
    def stop(self) -> int:
        """Index in the recording behind the last node."""
        return self.start + len(self.nodes) + len(self.ahead)

    @property
    def bound(self) -> float:
        """How far its results may be from the recorded operators', by the dtypes in it."""
        values = (value for node in self.nodes for value in node.values)
        return bound_of(value.geometry[3] for value in values)

    def node(self, function: Any) -> Node:
        """Return the node that calls ``function`` in place of the recorded ones."""
        arguments: list[Any] = [[*self.graph.inputs, *self.graph.constants]]
        op: Any = PieceOp(f"nodes_{self.start}_to_{self.stop - 1}", function)
        outputs: list[Value | None] = [*self.results]
        return Node(op, arguments, {}, outputs, "list")

    def make_graph(self, needed: Sequence[Value], bases: Bases) -> None:
        """``needed``: what comes later needs of it; ``bases`` are of the whole recording."""
        self._make_ahead({id(value.storage) for value in needed})
        here = {id(node) for node in self.nodes}
        seen = {id(value) for node in self.nodes for value in node.made}
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
        order = {id(value): n for n, node in enumerate(self.nodes) for value in node.outputs}
        self.results = sorted(results.values(), key=lambda value: order[id(value)])
        self.graph = StretchGraph(self.nodes, bases, self.results)
        self.parts = [_view(part, base) for part, base in self.graph.parts]
        self.views = [*views.values()]

    def _make_ahead(self, needed: Container[int]) -> None:
        """Make memory without contents ahead that is needed later, by the ids of storages.

        What nobody has written is the same in no two runs, so as a result of a compiled function
        it could not be compared with what was recorded.
        """
        empty = (node for node in self.nodes if is_empty(node.op))
        moved = [node for node in empty if id(node.made[0].storage) in needed]
        self.ahead += map(_bare, moved)
        self.nodes = [node for node in self.nodes if node not in moved]


def optimizer_kernels(nodes: Sequence[Node]) -> int:
    """Return how many nodes at the end are kernels of optimizers, which are never compiled."""
    return sum(1 for _ in takewhile(_is_optimizer_kernel, reversed(nodes)))


def _is_optimizer_kernel(node: Node) -> bool:
    return schema_of(node.op).name.startswith(("aten::_fused_", "graphfsdp::fused_"))


class Cutter:
    """Decides what is compiled together.

    Note [Random numbers]: a compiler may reorder what draws from a generator, and its own
    generators draw other numbers. So what draws runs as it was recorded. Most of it fills new
    memory, as dropout's mask: that needs nothing of the iteration and is drawn ahead of the
    piece that it lies in, in the recorded order, and cuts nothing.
    """

    def __init__(self, nodes: Sequence[Node], borders: Collection[int | None]) -> None:
        """No piece goes across a border, such as the point up to which replays can be undone."""
        self._nodes = nodes
        self._borders = {*borders, *_layer_borders(nodes)}
        self._mixed = _storages_of_several_dtypes(nodes)

    def cut(self, refused: Mapping[int, str]) -> list[Piece]:
        """Cut anew; ``refused`` has why not, by id of a Node that was found not to compile."""
        found: list[Piece] = []
        current = Piece(0, [])

        def end(next_start: int) -> None:
            nonlocal current
            if current.nodes or current.ahead:
                found.extend(_as_far_as_it_pays(current))
            current = Piece(next_start, [])

        for index, node in enumerate(self._nodes):
            if index in self._borders:
                end(index)
            reason = refused.get(id(node)) or self._reason(node)
            if not reason:
                current.nodes.append(node)
            elif reason != _DRAWS or not _draw_ahead(current, node):
                end(index)
                found.append(Piece(index, [node], reason=reason))
                current.start = index + 1
        end(len(self._nodes))
        return found

    def _reason(self, node: Node) -> str:
        """Return why a node runs as it was recorded; "" if it may be compiled."""
        if _is_optimizer_kernel(node):
            return "is one kernel already"
        if node.op.namespace not in ("aten", "prims"):
            return "is no operator of torch"
        if node.call.draws_numbers():
            return _DRAWS
        if torch.Tag.dynamic_output_shape in node.op.tags:
            return "has a result whose shape depends on numbers"
        values = node.values
        forms = [value.geometry for value in values]
        if any(conj or neg or dtype.is_complex for *_, dtype, conj, neg in forms):
            return "computes with complex numbers"
        if any(id(value.storage) in self._mixed for value in values):
            return "looks at memory as several dtypes"
        return ""


def _as_far_as_it_pays(piece: Piece) -> Iterator[Piece]:
    computing = [
        node for node in piece.nodes if node.effects or not (_is_view(node) or is_empty(node.op))
    ]
    if len(computing) >= _FEWEST:
        yield piece
        return
    index = piece.start
    for node in (*piece.ahead, *piece.nodes):
        yield Piece(index, [node], reason="is too little to compile")
        index += 1


def _is_view(node: Node) -> bool:
    read = {id(value.storage) for value in node.inputs}
    return all(id(value.storage) in read for value in node.made)


def _draw_ahead(piece: Piece, node: Node) -> bool:
    """Draw before the piece, if that is the same; return whether it is."""
    infos = {id(value.storage): value.storage for value in node.inputs}
    before = [n for n in piece.nodes if any(id(v.storage) in infos for v in n.values)]
    made = {id(value.storage) for n in before for value in n.made}
    # Of memory that was there before, or that somebody looks at otherwise, nothing is known.
    if not all(key in made and not info.external for key, info in infos.items()):
        return False
    if not all(is_empty(n.op) and len(n.outputs) == 1 for n in before):
        return False
    for each in before:
        value = each.made[0]
        if id(value.storage) not in infos or value.geometry[0]:
            return False
    piece.nodes = [n for n in piece.nodes if n not in before]
    piece.ahead += [*map(_bare, before), node]
    return True


def _bare(node: Node) -> Node:
    """Return what makes the same memory and needs no tensor for it (``empty_like`` does)."""
    _, shape, stride, dtype, *_ = node.made[0].geometry
    arguments = [list(shape), list(stride)]
    kwargs = {"dtype": dtype}
    return replace(node, op=_EMPTY, args=arguments, kwargs=kwargs)


def _storages_of_several_dtypes(nodes: Sequence[Node]) -> set[int]:
    dtypes: dict[int, set[torch.dtype]] = {}
    for node in nodes:
        for value in node.values:
            dtypes.setdefault(id(value.storage), set()).add(value.geometry[3])
    return {key for key, found in dtypes.items() if len(found) > 1}


def _layer_borders(nodes: Sequence[Node]) -> set[int]:
    """Return where equal layers begin and end, by index of a node.

    Note [Layers]: cut there, all layers are one compiled function. What crosses the border has to
    be written to memory, which most of it is anyway, for backward.
    """
    numbers: dict[Any, int] = {}
    codes = np.array([numbers.setdefault(_form(node), len(numbers)) for node in nodes])
    borders: set[int] = set()
    taken = np.zeros(len(nodes), dtype=bool)
    for period, start, count in sorted(_repeats(codes), key=lambda each: each[0] * (1 - each[2])):
        stop = start + period * count
        if not taken[start:stop].any():
            taken[start:stop] = True
            borders |= set(range(start, stop + 1, period))
    return borders


def _repeats(codes: np.ndarray[Any, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield length and start of a layer, and how often it comes in a row."""
    for period in range(_FEWEST_OF_LAYER, len(codes) // 2 + 1):
        equal = np.concatenate([[False], codes[:-period] == codes[period:], [False]])
        changes = np.flatnonzero(equal[1:] != equal[:-1])
        for start, stop in zip(changes[::2], changes[1::2], strict=True):
            if stop - start >= period:
                yield period, int(start), int(stop - start) // period + 1


def _form(item: Any) -> Any:
    """Return what two equal operator calls have in common, hashable."""
    if isinstance(item, Node):
        kwargs = [_form([name, value]) for name, value in item.kwargs.items()]
        return (item.op, _form(item.args), tuple(kwargs), _form(item.outputs))
    if isinstance(item, Value):
        return (item.storage.external, *item.geometry[1:])
    if isinstance(item, Tensor):
        return torch.Tensor
    if isinstance(item, list):
        return tuple(map(_form, item))
    return repr(item)


def find_pieces(
    nodes: Sequence[Node],
    borders: Collection[int | None],
    roots: Sequence[Value],
    refused: dict[int, str],
) -> list[Piece]:
    """Cut a recording, whose ``roots`` outlive it.

    ``refused`` has why a node cannot be compiled, by its id, and is added to.
    """
    bases: dict[int, tuple[Value, Node]] = {}
    for node in nodes:
        for value in node.made:
            if not value.storage.external:
                bases.setdefault(id(value.storage), (value, node))
    cutter = Cutter(nodes, borders)
    while True:
        pieces = cutter.cut(refused)
        num_refused = len(refused)
        needed = list(roots)  # behind a piece
        for piece in reversed(pieces):
            used = [v for node in (*piece.ahead, *piece.nodes) for v in node.values]
            if not piece.reason:
                piece.make_graph(needed, bases)
                refused |= piece.graph.refused
            needed += used
        if len(refused) == num_refused:
            return pieces


def _view(value: Value, base: Value) -> Node:
    offset, shape, stride, *_ = value.geometry
    arguments = [base, list(shape), list(stride), offset]
    return Node(_AS_STRIDED, arguments, {}, [value], "tensor", effects=False)
