"""Records one iteration on a CPU as nodes over values, while it runs for real."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.rules.refusals import NEW_GENERATOR, Refusal
from graphfsdp._capture.rules.watcher import Watcher
from graphfsdp._capture.trace.values import (
    Geometry,
    Node,
    StorageInfo,
    Value,
    as_bytes,
    geometry_of,
    storage_of,
)
from graphfsdp.base.op_tensors import OpCall, is_empty
from graphfsdp.base.torch_internals import OpOverload, key_of
from graphfsdp.errors import HazardKind


class Recorder(Watcher):
    """A watcher that writes down what it sees.

    Note [Values, not tensors]: autograd re-wraps saved tensors, so the identity of a tensor says
    nothing. What counts is the memory it looks at: storage plus geometry. Two tensors with the
    same storage and geometry are one Value. Storages are held weakly, because a recorder that
    holds tensors changes the program (AccumulateGrad copies a gradient that somebody else
    holds) and doubles the memory.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, *, defers_refusals: bool = False
    ) -> None:
        super().__init__(model, device, defers_refusals=defers_refusals)
        self.nodes: list[Node] = []
        self._first_value: dict[int, Value] = {}  # by id of the StorageInfo
        self._values: dict[tuple[int, Geometry], Value] = {}  # by that and the geometry
        self._geometries: dict[Geometry, Geometry] = {}  # there are few, so they are shared

    def on_op(self, call: OpCall) -> Any:
        if torch.Tag.inplace_view in call.op.tags:
            return self._run_inplace_view(call)
        if call.is_literal:
            return self._run_literal(call)
        name = call.name
        self._judge_generators(call)
        self._keep_unseen_contents(call)
        node = Node.of(call, partial(self.value_of, op=name), self.site)
        for tensor in call.written:
            self._known(tensor, name).filled = True
        result = call.run() if call.is_trusted else self._run_distrusted(call)
        self._finish(node, call, result)
        return result

    def value_of(self, tensor: Tensor, op: str) -> Value:
        info, geometry = self._known(tensor, op), self._geometry_of(tensor)
        key = id(info), geometry
        value = self._values.get(key)
        if value is None:
            value = Value(info, geometry, None)
            if not info.external:
                # A view that no operator made (autograd's saved tensors, Tensor.data).
                value.node = self._append_view(info, value)
            self._values[key] = value
            self._first_value.setdefault(id(info), value)
        return value

    def forget_tensors(self) -> None:
        """Let go of what tells tensors from one another: the program is complete."""
        self._values.clear()
        self._first_value.clear()
        self._geometries.clear()

    def first_value(self, info: StorageInfo) -> Value | None:
        """Return the first Value ever made on a storage: what its creator returned."""
        return self._first_value.get(id(info))

    def _known(self, tensor: Tensor, op: str) -> StorageInfo:
        return self.storages.known(tensor, op, external=True, varies=True)

    def _geometry_of(self, tensor: Tensor) -> Geometry:
        geometry = geometry_of(tensor)
        return self._geometries.setdefault(geometry, geometry)

    def _append_view(self, info: StorageInfo, value: Value) -> int:
        offset, shape, stride, dtype, conj, neg = value.geometry
        base = self._first_value[id(info)]
        if conj or neg or dtype != base.geometry[3]:
            self.refuse(
                "as_strided",
                Refusal(
                    f"a {dtype} view (conjugate={conj}, negative={neg}) of a {base.geometry[3]} "
                    "tensor was made without an operator, so the recording cannot repeat it",
                    "make the view with tensor operations, such as Tensor.view(dtype)",
                    HazardKind.MEMORY,
                ),
            )
        op = torch.ops.aten.as_strided.default
        self._append(op, [base, list(shape), list(stride), offset], value, effects=False)
        return len(self.nodes) - 1

    def _append(self, op: OpOverload, args: list[Any], output: Value, *, effects: bool) -> None:
        """Append a node of an operator that the iteration has not called."""
        node = Node(op, args, {}, [output], "tensor", effects=effects, site=self.site)
        self.nodes.append(node)

    def _finish(self, node: Node, call: OpCall, result: Any) -> None:
        """Give the results their Values and append the node, unless it only makes known views."""
        name = call.name
        listed = isinstance(result, list | tuple)
        results = list(result) if listed else [result]
        node.results = "list" if listed else "tensor" if isinstance(result, Tensor) else "none"
        index = len(self.nodes)
        aliases = True  # all results look at storages that were there before
        news = False  # some result needs this node to exist
        for item in results:
            if not isinstance(item, Tensor):
                node.outputs.append(None)
                continue
            info = self.storages.find(item, name)
            if info is None:
                info = self.storages.add(item, name, external=False, varies=False)
                info.filled = not is_empty(node.op)
                aliases = False
            key = id(info), self._geometry_of(item)
            value = self._values.get(key)
            if value is None:
                value = Value(info, key[1], None if info.external else index)
                self._values[key] = value
                self._first_value.setdefault(id(info), value)
                news = news or not info.external
            node.outputs.append(value)
        is_torchs = node.op.namespace in ("aten", "prims")
        writes = bool(call.written) or call.is_random
        node.effects = writes or not is_torchs or node.results == "none"
        if not node.effects and aliases and not news and call.tensors:
            return  # a view of fixed storage, or one that exists: nothing to do at replay
        self.nodes.append(node)

    def _run_literal(self, call: OpCall) -> Any:
        """Repeat a constant that Python filled in: each replay starts from a fresh copy of it."""
        tensor = call.args[0]
        info = self._known(tensor, call.name)
        geometry = self._geometry_of(tensor)
        value = Value(info, geometry, len(self.nodes))
        self._values[id(info), geometry] = value
        self._first_value[id(info)] = value
        self._append(torch.ops.aten.clone.default, [tensor.clone()], value, effects=False)
        return call.run()

    def _keep_unseen_contents(self, call: OpCall) -> None:
        """Make contents that were written below all operators part of the program.

        Some of torch's C++ functions fill an empty tensor with numbers by themselves; the first
        read is the time to notice.
        """
        infos = map(self.storages.get, call.keys)
        if all(info is None or info.filled for info in infos):
            return
        for tensor in call.read():
            info = self._known(tensor, call.name)
            if info.filled:
                continue
            info.filled = True
            value = self._first_value[id(info)]
            offset, shape, stride, dtype, *_ = value.geometry
            contents = torch.empty(0, dtype=dtype, device="cpu")
            contents = contents.set_(info.get(), offset, shape, stride).clone()
            self._append(torch.ops.aten.copy_.default, [value, contents], value, effects=True)

    def _judge_generators(self, call: OpCall) -> None:
        if call.is_trusted and not call.is_random:
            return
        for generator in (*call.args, *call.kwargs.values()):
            if isinstance(generator, torch.Generator) and _is_new(generator):
                self.refuse(call.name, NEW_GENERATOR.of(call.name))

    def _run_inplace_view(self, call: OpCall) -> Any:
        """Run an operator that changes how its argument looks at its storage, and nothing else.

        It makes no node: what uses the tensor later makes the new view of the old storage.
        """
        op, tensor = call.name, call.args[0]
        before = storage_of(tensor, op).nbytes()
        result = call.run()
        self._known(tensor, op)
        if storage_of(tensor, op).nbytes() > before:
            self.refuse(
                op,
                Refusal(
                    f"{op} grows a storage inside the iteration; a graph's memory is planned",
                    "allocate the tensor at its full size",
                    HazardKind.MEMORY,
                ),
            )
        return result

    def _run_distrusted(self, call: OpCall) -> Any:
        """Run an operator of somebody else, and refuse it if it writes without saying so."""
        op = call.name
        declared = {key_of(storage_of(tensor, op)) for tensor in call.written}
        secret = [each for each in call.tensors if key_of(storage_of(each, op)) not in declared]
        before = [as_bytes(storage_of(tensor, op)).clone() for tensor in secret]
        result = call.run()
        for tensor, old in zip(secret, before, strict=True):
            if not torch.equal(as_bytes(storage_of(tensor, op)), old):
                shape = tuple(tensor.shape)
                self.refuse(
                    op,
                    Refusal(
                        f"{op} writes an argument (a {tensor.dtype} tensor of shape {shape}) "
                        "without saying so in its schema, so what it does cannot be repeated "
                        "or undone",
                        "declare the write (torch.library.custom_op(..., mutates_args=...))",
                        HazardKind.HIDDEN_WRITE,
                    ),
                )
        return result


def _is_new(generator: torch.Generator) -> bool:
    return torch.equal(generator.get_state(), torch.Generator(generator.device).get_state())
