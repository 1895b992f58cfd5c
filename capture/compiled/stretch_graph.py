"""A stretch of a recording as an FX graph."""

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphfsdp._capture.compiled.views import derive, is_part, regions
from graphfsdp._capture.trace.values import Geometry, Node, Value, span
from graphfsdp.base.op_tensors import RUNNING_STATISTICS

_ATEN = torch.ops.aten
_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
# Queries times the width of a head, up to which torch's kernel was faster in float32 than in
# bfloat16, on a processor that multiplies bfloat16: it lays out 16-bit operands anew for each small
# product (18 times at 32 x 16, 1.2 times at 256 x 64, equal at 512 x 32).
_SHORT_ATTENTION = 256 * 64

# What made a storage: the first value of it and its node, by id of the storage's info.
Bases = Mapping[int, tuple[Value, Node]]


class StretchGraph:
    """Converts nodes to FX, operator by operator: nothing is traced anew.

    Memory from before the stretch is an input: of external storages the stretches of memory that
    overlap, of others what made them, or a part of that. What the nodes write of it, the graph
    writes.

    Attributes:
        inputs: What the graph is to be called with; then come ``constants``.
        parts: Which of them are parts of what an earlier node made, and of what.
        constants: Tensors that the recording holds.
        fakes: Stand-ins of all of these.
        module: The graph; it returns a tuple.
        slow: Attention in 16 bits, backward, that is faster in float32, with its dtype.
        refused: Why a node cannot be compiled, by its id; if there are any, the rest is void.
    """

    def __init__(self, nodes: Sequence[Node], bases: Bases, results: Sequence[Value]) -> None:
        """``results`` are among the bases."""
        self.inputs: list[Value] = []
        self.parts: list[tuple[Value, Value]] = []
        self.constants: list[Tensor] = []
        self.fakes: list[Tensor] = []
        self.slow: dict[fx.Node, torch.dtype] = {}
        self.refused: dict[int, str] = {}
        self._graph = fx.Graph()
        self._fake_of: dict[fx.Node, Any] = {}
        self._entries: dict[int, fx.Node] = {}  # by id of a Value or of a constant
        self._scalars: dict[fx.Node, fx.Node] = {}
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy: a second

        self._mode = FakeTensorMode(shape_env=ShapeEnv())
        self._bases = bases
        with self._mode, torch.no_grad():
            self._add_inputs(nodes)
            for node in nodes:
                try:
                    self._add(node)
                except _UnlikeError as error:
                    self.refused[id(node)] = str(error)
                    self._fill_in(node)
                except Exception as error:
                    self.refused[id(node)] = f"raises {in_one_line(error)}"
                    self._fill_in(node)
        self._graph.output(tuple(self._entries[id(value)] for value in results))
        self.module = fx.GraphModule(torch.nn.Module(), self._graph)

    def form(self) -> Hashable:
        """Return what graphs that compute the same from other memory have in common."""
        fakes = [(tuple(fake.shape), fake.stride(), fake.dtype) for fake in self.fakes]
        return (self.module.code, *fakes)

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
            geometry = (0, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, False, False)
            self._entries[id(tensor)] = self._placeholder(geometry)
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
        _, shape, stride, dtype, *_ = geometry
        entry = self._graph.placeholder(f"x{len(self.fakes)}")
        fake = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        self.fakes.append(fake)
        self._fake_of[entry] = fake
        return entry

    def _add(self, node: Node) -> None:
        args = [self._argument(item, node) for item in node.args]
        kwargs = {name: self._argument(item, node) for name, item in node.kwargs.items()}
        results = self._results(node.op, args, kwargs)
        for value, result in zip(node.outputs, results, strict=True):
            if value is None or value.storage.external:
                continue
            self._check(result, value)
            self._entries.setdefault(id(value), result)

    def _results(
        self, op: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
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
        if op is _ATTENTION_BACKWARD and self._is_slow(args[1]):
            self.slow[result] = self._fake_of[args[1]].dtype
        fake = self._fake_of[result]
        if not isinstance(fake, list | tuple):
            return [result]
        entries = []
        for index, member in enumerate(fake):
            entry = self._graph.call_function(operator.getitem, (result, index))
            self._fake_of[entry] = member
            entries.append(entry)
        return entries

    def _is_slow(self, query: fx.Node) -> bool:
        fake = self._fake_of[query]
        if fake.dtype == torch.bfloat16:
            return int(fake.shape[-2] * fake.shape[-1]) <= _SHORT_ATTENTION
        return bool(fake.dtype == torch.float16)

    def _emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        entry = self._graph.call_function(op, args, kwargs)
        fake_args = fx.node.map_arg(args, self._fake_of.__getitem__)
        fake_kwargs = fx.node.map_arg(kwargs, self._fake_of.__getitem__)
        self._fake_of[entry] = op(*fake_args, **fake_kwargs)
        return entry

    def _check(self, entry: fx.Node, value: Value) -> None:
        """Refuse an operator of which torch tells the compiler another form than it has."""
        fake = self._fake_of[entry]
        _, shape, stride, dtype, *_ = value.geometry
        told = [step for size, step in zip(fake.shape, fake.stride(), strict=True) if size != 1]
        real = [step for size, step in zip(shape, stride, strict=True) if size != 1]
        if tuple(fake.shape) != shape or fake.dtype != dtype or (told != real and fake.numel()):
            raise _UnlikeError("has a result of other strides than its description")
        base = self._bases[id(value.storage)][0].geometry
        if value.geometry[0] < base[0] or _end(value.geometry) > _end(base) or base[0]:
            raise _UnlikeError("has a result that is a part of its memory")

    def _fill_in(self, node: Node) -> None:
        """Go on after a node that is refused, to find all others that are."""
        for value in node.outputs:
            if value is not None and id(value) not in self._entries:
                self._entries[id(value)] = self._placeholder(value.geometry)

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


class _UnlikeError(Exception):
    """An operator returns something else than a compiler is told."""


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
