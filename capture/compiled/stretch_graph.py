"""A stretch of a recording as an FX graph."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphfsdp._capture.compiled.views import derive, is_part, regions
from graphfsdp._capture.trace.values import Geometry, Node, Value, geometry_of, span
from graphfsdp.base.op_tensors import RUNNING_STATISTICS
from graphfsdp.base.torch_internals import schema_of

_ATEN = torch.ops.aten

# What made a storage: the first value of it and its node, by id of the storage's info.
Bases = Mapping[int, tuple[Value, Node]]


class StretchGraph:
    """Converts nodes to FX, operator by operator: nothing is traced anew.

    Memory from before the stretch is an input: of external storages the stretches of memory that
    overlap, of others what made them, or a part of that. What the nodes write of it, the graph
    writes.

    Attributes:
        nodes: What was converted.
        inputs: What the graph is to be called with; then come ``constants``.
        parts: Which of them are parts of what an earlier node made, and of what.
        constants: Tensors that the recording holds.
        text: The graph and the forms of its tensors, as worker.py reads it: the same for graphs
            that compute the same from other memory.
        refused: Why a node cannot be compiled, by its id; if there are any, the rest is void.
    """

    def __init__(self, nodes: Sequence[Node], bases: Bases, results: Sequence[Value]) -> None:
        """``results`` are among the bases."""
        self.nodes = nodes
        self.inputs: list[Value] = []
        self.parts: list[tuple[Value, Value]] = []
        self.constants: list[Tensor] = []
        self.refused: dict[int, str] = {}
        self._graph = fx.Graph()
        self._entries: dict[int, fx.Node] = {}  # by id of a Value or of a constant
        self._scalars: dict[fx.Node, fx.Node] = {}
        self._number: int | None = None  # of the node that is converted
        self._bases = bases
        self.text = ""
        self._add_inputs(nodes)
        for self._number, node in enumerate(nodes):
            try:
                self._add(node)
            except Exception as error:
                self.refused[id(node)] = f"raises {in_one_line(error)}"
                return
        self._graph.output(tuple(self._entries[id(value)] for value in results))
        self.text = "\n".join(map(_line, self._graph.nodes))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the operators one by one, which computes what was recorded."""
        return list(fx.Interpreter(torch.nn.Module(), graph=self._graph).run(*inputs))

    def _add_inputs(self, nodes: Sequence[Node]) -> None:
        here = {id(node) for node in nodes}
        outer: list[Value] = []
        inner: dict[int, list[Value]] = {}  # by id of a storage
        for node in nodes:
            for value in node.values:
                key = id(value.storage)
                if value.storage.external:
                    outer.append(value)
                elif id(self._bases[key][1]) not in here:
                    inner.setdefault(key, []).append(value)
        found = list(regions(outer))
        for key, values in inner.items():
            base = self._bases[key][0]
            parts = list(regions(values))
            # A part is an input of its own: equal layers look at other parts of what is stacked.
            if all(is_part(whole, base) for whole, _ in parts):
                found += parts
                self.parts += [(whole, base) for whole, _ in parts]
            else:
                found.append((base, values))
        for whole, _ in found:
            self.inputs.append(whole)
            self._entries[id(whole)] = self._placeholder(whole.geometry)
        for tensor in _constants(nodes):
            self.constants.append(tensor)
            self._entries[id(tensor)] = self._placeholder(geometry_of(tensor))
        for whole, members in found:
            entry = self._entries[id(whole)]
            for value in members:
                if id(value) in self._entries:
                    continue
                try:
                    view = derive(entry, whole.geometry, value.geometry, self._emit)
                except ValueError as error:
                    users = (node for node in nodes if any(v is value for v in node.values))
                    self.refused |= {id(node): str(error) for node in users}
                    view = self._placeholder(value.geometry)
                self._entries[id(value)] = view

    def _placeholder(self, geometry: Geometry) -> fx.Node:
        entry = self._graph.placeholder(f"x{len(self._graph.nodes)}")
        entry.meta["form"] = geometry[1:4]
        return entry

    def _add(self, node: Node) -> None:
        args = [self._argument(item, node) for item in node.args]
        kwargs = {name: self._argument(item, node) for name, item in node.kwargs.items()}
        results = self._results(node, args, kwargs)
        for value, result in zip(node.outputs, results, strict=True):
            if value is None or value.storage.external:
                continue
            offset, *_ = base = self._bases[id(value.storage)][0].geometry
            if value.geometry[0] < offset or _end(value.geometry) > _end(base) or offset:
                self.refused[id(node)] = "has a result that is a part of its memory"
            result.meta["form"] = value.geometry[1:4]
            self._entries.setdefault(id(value), result)

    def _results(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
        op = node.op
        looks = _hidden_looks(node)
        if looks:
            return [
                derive(self._entries[id(base)], base.geometry, value.geometry, self._emit)
                for value, base in looks
            ]
        if op is _ATEN._foreach_norm.Scalar:  # Inductor has no kernel of its own for it
            power = args[1] if len(args) > 1 else kwargs.get("ord", 2)
            dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
            norm = _ATEN.linalg_vector_norm.default
            return [self._emit(norm, each, power, None, False, dtype=dtype) for each in args[0]]
        if op is _ATEN.native_batch_norm.default:
            # Its schema does not say that it writes its statistics; that of the other one does.
            if args[RUNNING_STATISTICS.start] is None:
                legit = _ATEN._native_batch_norm_legit.no_stats
                args = [*args[: RUNNING_STATISTICS.start], *args[RUNNING_STATISTICS.stop :]]
            else:
                legit = _ATEN._native_batch_norm_legit.default
            op = legit
        result = self._emit(op, *args, **kwargs)
        if node.results != "list":
            return [result]
        return [self._emit(operator.getitem, result, i) for i in range(len(node.outputs))]

    def _emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        entry = self._graph.call_function(op, args, kwargs)
        entry.meta["number"] = self._number
        return entry

    def _argument(self, item: Any, node: Node) -> Any:
        if isinstance(item, list):
            return [self._argument(member, node) for member in item]
        if isinstance(item, Tensor):
            return self._entries[id(item)]
        if not isinstance(item, Value):
            return item
        entry = self._entries[id(item)]
        makes_more = any(v is not None and _numel(v) > 1 for v in node.outputs)
        if item.storage.external or _numel(item) > 1 or not makes_more:
            return entry
        # Note [Scalars]: a compiler computes a number where it is used, for each element anew
        # (Adam's powers of beta). What is looked at by strides, it computes once and keeps.
        scalar = self._scalars.get(entry)
        if scalar is None:
            _, shape, stride, *_ = item.geometry
            scalar = self._emit(_ATEN.as_strided.default, entry, list(shape), list(stride))
            self._scalars[entry] = scalar
        return scalar


def _hidden_looks(node: Node) -> list[tuple[Value, Value]]:
    """Return results, each with the operand whose memory it looks at against the schema's word.

    Such is ``unsafe_split``, by which a GRU cuts its gates: a compiler believes that what is
    written into a part leaves the whole as it is.
    """
    if any(result.alias_info is not None for result in schema_of(node.op).returns):
        return []
    operands = {id(value.storage): value for value in node.inputs}
    results = [value for value in node.outputs if value is not None]
    looks = [
        (value, operands[id(value.storage)]) for value in results if id(value.storage) in operands
    ]
    return looks if len(looks) == len(node.outputs) else []


def _line(entry: fx.Node) -> str:
    """Return a tuple as Python has it: name, operator, arguments, form, number of its node."""
    target = repr(entry.op)
    if entry.op == "call_function":
        is_member = entry.target is operator.getitem
        target = "operator.getitem" if is_member else f"torch.ops.{entry.target}"
    form, number = (entry.meta.get(name) for name in ("form", "number"))
    return f"({entry.name!r}, {target}, {entry.args}, {entry.kwargs}, {form}, {number})"


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def _end(geometry: Geometry) -> int:
    """Return how many elements lie from the start of the storage to the end."""
    length = span(geometry[1], geometry[2])
    return geometry[0] + length if length else 0


def _numel(value: Value) -> int:
    return torch.Size(value.geometry[1]).numel()


def _constants(nodes: Sequence[Node]) -> list[Tensor]:
    found: dict[int, Tensor] = {}

    def search(items: Any) -> None:
        for item in items:
            if isinstance(item, Tensor):
                found.setdefault(id(item), item)
            elif isinstance(item, list):
                search(item)

    for node in nodes:
        search([*node.args, *node.kwargs.values()])
    return list(found.values())
