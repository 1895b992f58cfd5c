"""A stretch of a recording as an FX graph, and how each view in it is derived from an input."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphfsdp._capture.trace.values import Geometry, Node, Value, geometry_of, span
from graphfsdp.base.op_tensors import RUNNING_STATISTICS
from graphfsdp.base.torch_internals import schema_of

_ATEN = torch.ops.aten

# What made a storage: the first value of it and its node, by id of the storage's info.
Bases = Mapping[int, tuple[Value, Node]]
_Emit = Callable[..., Any]  # appends a call of an operator to a graph and returns its result


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
        found = list(_regions(outer))
        for key, values in inner.items():
            base = self._bases[key][0]
            parts = list(_regions(values))
            # A part is an input of its own: equal layers look at other parts of what is stacked.
            if all(_is_part(whole, base) for whole, _ in parts):
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
                    view = _derive(entry, whole.geometry, value.geometry, self._emit)
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
        if any(_is_cut_by_strides(self._entries[id(value)]) for value in node.written):
            self.refused[id(node)] = "writes into what is cut out of a part by strides"
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
                _derive(self._entries[id(base)], base.geometry, value.geometry, self._emit)
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
        makes_more = any(value.numel > 1 for value in node.made)
        if item.storage.external or item.numel > 1 or not makes_more:
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
    looks = [
        (value, operands[id(value.storage)]) for value in node.made if id(value.storage) in operands
    ]
    return looks if len(looks) == len(node.outputs) else []


def _is_cut_by_strides(view: Any) -> bool:
    """Tell whether as_strided is one of several looks, through which no compiler can write."""
    looks = []
    while view.op == "call_function" and _is_look(view.target):
        looks.append(view.target)
        view = view.args[0]
    return len(looks) > 1 and _ATEN.as_strided.default in looks


def _is_look(op: Any) -> bool:
    if op is operator.getitem:
        return True
    aliases = [result.alias_info for result in schema_of(op).returns]
    return bool(aliases) and all(each is not None and not each.is_write for each in aliases)


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


def _derive(base: Any, known: Geometry, wanted: Geometry, emit: _Emit) -> Any:
    """Return the view ``wanted`` of the memory that ``base`` looks at as ``known``.

    By slices and permutations where they do, which a compiler follows, else by as_strided.

    Raises:
        ValueError: ``base`` does not hold all of it.
    """
    offset, shape, stride, *_ = wanted
    if known[:3] == (offset, shape, stride):
        return base
    first = offset - known[0]
    if known[3:] != wanted[3:] or first < 0 or first + span(shape, stride) > span(*known[1:3]):
        raise ValueError("a view reaches beyond the tensor that it is taken from")
    num = span(shape, stride)
    if not num:
        return emit(_ATEN.new_empty.default, base, list(shape))
    view = base
    if _is_contiguous(known[1], known[2]):
        view = emit(_ATEN.view.default, base, [-1])
        if num != torch.Size(known[1]).numel():
            view = emit(_ATEN.slice.Tensor, view, 0, first, first + num)
    elif first:
        raise ValueError("a view begins inside of a tensor with gaps")
    # What is repeated is taken once, and repeated then.
    cut = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    order = sorted(range(len(cut)), key=lambda dim: (-stride[dim], dim))
    sorted_shape = [cut[dim] for dim in order]
    is_dense = view is not base and _is_contiguous(sorted_shape, [stride[dim] for dim in order])
    if not is_dense:
        starts = _box(first, shape, stride, known)
        if starts is not None:  # which may be written into, unlike a look by strides
            for dim, (start, size) in enumerate(zip(starts, shape, strict=True)):
                if size != known[1][dim]:
                    base = emit(_ATEN.slice.Tensor, base, dim, start, start + size)
            return base
        # Without an offset, which would count from where the input's own memory begins.
        return emit(_ATEN.as_strided.default, view, list(shape), list(stride))
    view = emit(_ATEN.view.default, view, sorted_shape)
    if order != sorted(order):
        view = emit(_ATEN.permute.default, view, [order.index(dim) for dim in range(len(order))])
    return view if cut == shape else emit(_ATEN.expand.default, view, list(shape))


def _box(
    first: int, shape: Sequence[int], stride: Sequence[int], known: Geometry
) -> list[int] | None:
    """Return where a view begins in each dimension of a tensor without gaps, if it is cut of it."""
    if tuple(stride) != tuple(known[2]) or not _is_contiguous(known[1], known[2]):
        return None
    starts = []
    for size, step, whole in zip(shape, stride, known[1], strict=True):
        start, first = divmod(first, step) if whole > 1 else (0, first)
        if start + size > whole:
            return None
        starts.append(start)
    return None if first else starts


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _regions(values: Iterable[Value]) -> Iterator[tuple[Value, list[Value]]]:
    """Join values that overlap; yield a value that holds all of them, and which these are.

    In the order of first use, so that what is compiled does not depend on addresses.
    """
    by_storage: dict[int, dict[int, Value]] = {}
    first_use: dict[int, int] = {}
    for value in values:
        first_use.setdefault(id(value), len(first_use))
        by_storage.setdefault(id(value.storage), {})[id(value)] = value
    groups: list[list[Value]] = []
    for found in by_storage.values():
        end = -1
        current: list[Value] = []
        for value in sorted(found.values(), key=lambda each: each.geometry[0]):
            offset, shape, stride, *_ = value.geometry
            length = span(shape, stride)
            if not length:
                groups.append([value])
                continue
            if offset >= end:
                current = []
                groups.append(current)
            current.append(value)
            end = max(end, offset + length)
    groups.sort(key=lambda group: min(first_use[id(value)] for value in group))
    for group in groups:
        yield _whole(group), group


def _whole(group: Sequence[Value]) -> Value:
    if len(group) == 1:
        return group[0]
    first = min(value.geometry[0] for value in group)
    stop = max(_end(value.geometry) for value in group)
    for value in group:
        offset, shape, stride, *_ = value.geometry
        is_all = offset == first and span(shape, stride) == stop - first
        if is_all and _is_contiguous(shape, stride):
            return value
    geometry = (first, (stop - first,), (1,), group[0].geometry[3], False, False)
    return Value(group[0].storage, geometry, None)


def _is_part(value: Value, whole: Value) -> bool:
    """Tell whether a value without gaps takes less than half of another one's memory."""
    _, shape, stride, dtype, *_ = value.geometry
    length = span(shape, stride)
    fits = dtype == whole.geometry[3] and _is_contiguous(shape, stride)
    return fits and 0 < 2 * length <= span(*whole.geometry[1:3])
