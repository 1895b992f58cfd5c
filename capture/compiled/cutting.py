"""Cuts a recording into stretches that are compiled and nodes that run as they were recorded."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch

from graphfsdp._capture.compiled.repeats import layer_borders
from graphfsdp._capture.trace.values import Geometry, Node, Value
from graphfsdp.base.op_tensors import OpCall, is_empty
from graphfsdp.base.torch_internals import schema_of

# A call of a compiled piece costs about as much as so many operators.
_FEWEST = 4
_DRAWS = "draws random numbers"
_EMPTY = torch.ops.aten.empty_strided.default


@dataclass
class Stretch:
    """Nodes that follow one another.

    Attributes:
        start: Index in the recording of the first of them, those ahead included.
        nodes: The nodes that are compiled, or the one that is not.
        ahead: Nodes that run as recorded before ``nodes``, those that draw and those that make
            memory: see Note [Random numbers] and ``make_ahead``.
        reason: Why it runs as it was recorded; "" if it is to be compiled.
    """

    start: int
    nodes: list[Node]
    ahead: list[Node] = field(default_factory=list)
    reason: str = ""

    @property
    def stop(self) -> int:
        """Index in the recording behind the last node."""
        return self.start + len(self.nodes) + len(self.ahead)

    def make_ahead(self, needed: Container[int]) -> None:
        """Make memory without contents ahead that is needed later, by the ids of storages.

        What nobody has written is the same in no two runs, so as a result of a compiled function
        it could not be compared with what was recorded.
        """
        makes = [is_empty(node.op) and _storage_of(node) in needed for node in self.nodes]
        made = [node for node, moves in zip(self.nodes, makes, strict=True) if moves]
        self.ahead += map(_bare, made)
        self.nodes = [node for node, moves in zip(self.nodes, makes, strict=True) if not moves]


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
    stretch that it lies in, in the recorded order, and cuts nothing.
    """

    def __init__(self, nodes: Sequence[Node], borders: Collection[int | None]) -> None:
        """No stretch goes across a border, such as the point up to which replays can be undone."""
        self._nodes = nodes
        self._borders = {*borders, *layer_borders(nodes)}
        self._mixed = _storages_of_several_dtypes(nodes)

    def cut(self, refused: Mapping[int, str]) -> list[Stretch]:
        """Cut anew; ``refused`` has why not, by id of a Node that was found not to compile."""
        found: list[Stretch] = []
        current = Stretch(0, [])

        def end(next_start: int) -> None:
            nonlocal current
            if current.nodes or current.ahead:
                found.extend(_as_far_as_it_pays(current))
            current = Stretch(next_start, [])

        for index, node in enumerate(self._nodes):
            if index in self._borders:
                end(index)
            reason = refused.get(id(node)) or self._reason(node)
            if not reason:
                current.nodes.append(node)
            elif reason != _DRAWS or not _draw_ahead(current, node):
                end(index)
                found.append(Stretch(index, [node], reason=reason))
                current.start = index + 1
        end(len(self._nodes))
        return found

    def _reason(self, node: Node) -> str:
        """Return why a node runs as it was recorded; "" if it may be compiled."""
        if _is_optimizer_kernel(node):
            return "is one kernel already"
        if node.op.namespace not in ("aten", "prims"):
            return "is no operator of torch"
        if OpCall(node.op, node.args, node.kwargs).draws_numbers():
            return _DRAWS
        if torch.Tag.dynamic_output_shape in node.op.tags:
            return "has a result whose shape depends on numbers"
        values = node.values
        if any(conj or neg or dtype.is_complex for *_, dtype, conj, neg in map(_geometry, values)):
            return "computes with complex numbers"
        if any(id(value.storage) in self._mixed for value in values):
            return "looks at memory as several dtypes"
        return ""


def _as_far_as_it_pays(stretch: Stretch) -> Iterator[Stretch]:
    computing = [
        node for node in stretch.nodes if node.effects or not (_is_view(node) or is_empty(node.op))
    ]
    if len(computing) >= _FEWEST:
        yield stretch
        return
    index = stretch.start
    for node in (*stretch.ahead, *stretch.nodes):
        yield Stretch(index, [node], reason="is too little to compile")
        index += 1


def _is_view(node: Node) -> bool:
    read = {id(value.storage) for value in node.inputs}
    return all(value is None or id(value.storage) in read for value in node.outputs)


def _draw_ahead(stretch: Stretch, node: Node) -> bool:
    """Draw before the stretch, if that is the same; return whether it is."""
    infos = {id(value.storage): value.storage for value in node.inputs}
    before = [n for n in stretch.nodes if any(id(v.storage) in infos for v in n.values)]
    made = {id(value.storage) for n in before for value in n.outputs if value is not None}
    # Of memory that was there before, or that somebody looks at otherwise, nothing is known.
    if not all(key in made and not info.external for key, info in infos.items()):
        return False
    if not all(is_empty(n.op) and len(n.outputs) == 1 for n in before):
        return False
    for each in before:
        value = each.outputs[0]
        assert value is not None
        if id(value.storage) not in infos or value.geometry[0]:
            return False
    stretch.nodes = [n for n in stretch.nodes if all(n is not each for each in before)]
    stretch.ahead += [*map(_bare, before), node]
    return True


def _storage_of(node: Node) -> int:
    value = node.outputs[0]
    return 0 if value is None else id(value.storage)


def _bare(node: Node) -> Node:
    """Return what makes the same memory and needs no tensor for it (``empty_like`` does)."""
    value = node.outputs[0]
    assert value is not None
    _, shape, stride, dtype, *_ = value.geometry
    arguments = [list(shape), list(stride)]
    kwargs = {"dtype": dtype}
    return replace(node, op=_EMPTY, args=arguments, kwargs=kwargs)


def _geometry(value: Value) -> Geometry:
    return value.geometry


def _storages_of_several_dtypes(nodes: Sequence[Node]) -> set[int]:
    dtypes: dict[int, set[torch.dtype]] = {}
    for node in nodes:
        for value in node.values:
            dtypes.setdefault(id(value.storage), set()).add(value.geometry[3])
    return {key for key, found in dtypes.items() if len(found) > 1}
