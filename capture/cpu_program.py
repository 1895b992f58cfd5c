"""Turns recorded nodes into one straight-line Python function over operators.

No module, autograd or optimizer code is left in it: each line calls one operator, and each
intermediate is dropped after its last use, so the memory peak is near that of the iteration.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.cpu_recorder import Node, Recorder, Value
from graphfsdp._capture.direct_calls import direct_call
from graphfsdp._capture.storages import StorageInfo

Replay = Callable[[], tuple[Tensor, ...]]


class ProgramBuilder:
    """Generates the replay function of a finished recording.

    Note [Escapes]: a storage that the recording made and that is still alive when the iteration
    is over belongs to somebody (an attribute that the model assigned). A replay writes its new
    contents into it, so that whoever holds it sees the present iteration.
    """

    def __init__(self, recorder: Recorder, outputs: Sequence[Value]) -> None:
        """Prepare.

        Args:
            recorder: The finished recording; nothing but it may hold the iteration's tensors.
            outputs: Values of the iteration's results, which each replay returns.
        """
        self._recorder = recorder
        self._outputs = outputs
        self._namespace: dict[str, Any] = {"_torch": torch._C._VariableFunctions}
        self._names: dict[int, str] = {}  # by id of the Value
        self._constants: dict[int, str] = {}  # by id of the object
        self.escapes: list[Value] = []
        self._escaped: list[Tensor] = []  # holds what another thread might free while we build
        for info in recorder.storages:
            value = None if info.external else recorder.first_value(info)
            tensor = None if value is None or value.node is None else _if_alive(value)
            if value is not None and tensor is not None:
                self.escapes.append(value)
                self._escaped.append(tensor)
        self.nodes = _without_dead(recorder.nodes, [*self._outputs, *self.escapes])

    def build(self) -> Replay:
        """Return the function; each call runs the program once and returns fresh outputs."""
        lines = ["def replay():"]
        last_use = self._last_uses()
        for index, node in enumerate(self.nodes):
            lines.append("    " + self._line(node))
            dead = last_use.get(index)
            if dead:
                lines.append("    del " + ", ".join(dead))
        for value, tensor in zip(self.escapes, self._escaped, strict=True):
            target = self._constant(tensor, "e")
            lines.append(f"    {target}.copy_({self._name(value)})")
        lines.append(f"    return ({''.join(self._name(v) + ', ' for v in self._outputs)})")
        code = compile("\n".join(lines), "<graphfsdp cpu graph>", "exec")
        exec(code, self._namespace)
        replay: Replay = self._namespace["replay"]
        return replay

    def _last_uses(self) -> dict[int, list[str]]:
        """Return the local names whose last use is at each node."""
        keep = {id(value) for value in (*self._outputs, *self.escapes)}
        last: dict[int, tuple[int, Value]] = {}
        for index, node in enumerate(self.nodes):
            outputs = (value for value in node.outputs if value is not None)
            for value in (*_values_in(node), *outputs):
                last[id(value)] = (index, value)
        uses: dict[int, list[str]] = {}
        for index, value in last.values():
            if value.node is not None and id(value) not in keep:
                uses.setdefault(index, []).append(self._name(value))
        return uses

    def _name(self, value: Value) -> str:
        name = self._names.get(id(value))
        if name is None:
            if value.node is None:
                name = self._constant(_materialise(value), "x")
            else:
                name = f"v{len(self._names)}"
            self._names[id(value)] = name
        return name

    def _constant(self, item: object, prefix: str) -> str:
        name = self._constants.get(id(item))
        if name is None:
            name = f"{prefix}{len(self._constants)}"
            self._constants[id(item)] = name
            self._namespace[name] = item  # the namespace keeps the item, so its id stays its own
        return name

    def _line(self, node: Node) -> str:
        call = self._call(node)
        inputs = {id(value) for value in _values_in(node)}
        targets = [
            self._name(value)
            if value is not None and value.node is not None and id(value) not in inputs
            else None
            for value in node.outputs
        ]
        if not any(targets):
            return call
        if node.results == "tensor":
            return f"{targets[0]} = {call}"
        # Results nobody needs go to a name that is overwritten at once, not kept.
        names = ", ".join(target or "_" for target in targets)
        line = f"[{names}] = {call}"
        return f"{line}; _ = None" if None in targets else line

    def _call(self, node: Node) -> str:
        parts = [self._argument(value) for value in node.args]
        if not node.kwargs:
            listed = len(parts) > 1 and isinstance(node.args[1], list)
            call = direct_call(node.op, parts, parts[1][1:-1] if listed else None)
            if call is not None:
                return call
        parts += [f"{name}={self._argument(value)}" for name, value in node.kwargs.items()]
        return f"{self._constant(node.op._op, 'op')}({', '.join(parts)})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, Value):
            return self._name(value)
        if isinstance(value, list):
            return f"[{', '.join(self._argument(item) for item in value)}]"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self._constant(value, "c")


def _if_alive(value: Value) -> Tensor | None:
    """Return a tensor over the value's storage, None if nobody has it any more."""
    try:
        return _materialise(value)
    except ReferenceError:
        return None


def _materialise(value: Value) -> Tensor:
    """Return a tensor that looks at existing storage as the value does."""
    offset, shape, stride, dtype, conj, neg = value.geometry
    storage = value.storage.get()
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, shape, stride)
    if conj:
        tensor = tensor.conj()
    if neg:
        tensor = torch._neg_view(tensor)
    return tensor


def _values_in(node: Node) -> Iterable[Value]:
    def walk(items: Iterable[Any]) -> Iterable[Value]:
        for item in items:
            if isinstance(item, Value):
                yield item
            elif isinstance(item, list):
                yield from walk(item)

    yield from walk(node.args)
    yield from walk(node.kwargs.values())


def _without_dead(nodes: Sequence[Node], roots: Sequence[Value]) -> list[Node]:
    """Drop the nodes that only make what nobody reads.

    Works on storages, not values: a write into a storage that is read later is never dropped.
    """
    live: set[int] = {id(value.storage) for value in roots}
    kept: list[Node] = []
    for node in reversed(nodes):
        makes = [value.storage for value in node.outputs if value is not None]
        if node.effects and _writes_nothing_seen(node, live):
            continue
        if node.effects or any(id(storage) in live for storage in makes):
            live.update(id(storage) for storage in node.touched)
            kept.append(node)
    kept.reverse()
    return kept


def _writes_nothing_seen(node: Node, live: set[int]) -> bool:
    """Tell whether a writing node writes only storages of the iteration that nobody reads on."""
    if node.results == "none" or node.op.namespace not in ("aten", "prims"):
        return False
    if torch.Tag.nondeterministic_seeded in node.op.tags:
        return False
    return not any(_is_seen(info, live) for info in node.touched)


def _is_seen(info: StorageInfo, live: set[int]) -> bool:
    return info.external or id(info) in live


__all__ = ["ProgramBuilder", "Replay"]
