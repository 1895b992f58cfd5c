"""Has gradients computed where they are to be copied to, while an iteration is captured.

Note [Landing]: a program of a CPU leaves copies into persistent gradients out (cpu/memory.py). A
CUDA graph is not rewritten: what the last warm-up did is written down, and when the capture comes
to a product that was only copied into a gradient, the operator is called with ``out=`` that
gradient, and the copy is left out. Every operator of the capture is compared with that of the
warm-up before it runs, by the memory that it is given. Where they part, nothing is redirected any
more; if they do while a product waits in a gradient for its copy, the capture is refused.

Gradients of shards are copied into a buffer that is made when all of a unit's have come, and that
a collective reduces. Its memory is taken when the first of them is computed, and given to the
iteration when it asks for the buffer; so it is never there beside what has landed in it.

Note [Operators with out=]: torch generates an ``out=`` variant for nearly every operator, but most
of these compute and then copy. ``WITH_OUT`` lists the ones whose kernel writes into the given
tensor (structured kernels, and some hand-written ones). Every result is bit for bit what the
operator would have returned: same kernel, same strides.
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.trace.values import (
    Geometry,
    Node,
    StorageTable,
    Value,
    before,
    geometry_of,
    is_plain,
    is_whole,
    materialise,
    places,
    replaced,
    span_bytes,
    touches_of,
)
from graphfsdp.base.op_tensors import OpCall, flat_tensors, is_empty, storage_key
from graphfsdp.base.torch_internals import OpOverload, has_kernel, key_of, schema_of, without_modes
from graphfsdp.errors import CaptureError, HazardKind

_POINTWISE = (
    *("abs", "acos", "acosh", "add.Tensor", "addcdiv", "addcmul", "angle", "asin", "asinh", "atan"),
    *("atan2", "atanh", "ceil", "bitwise_and.Tensor", "bitwise_not", "bitwise_or.Tensor"),
    *("bitwise_xor.Tensor", "clamp", "clamp.Tensor", "clamp_max", "clamp_max.Tensor", "clamp_min"),
    *("clamp_min.Tensor", "complex", "copysign.Tensor", "cos", "cosh", "digamma", "div.Tensor"),
    *("div.Tensor_mode", "elu", "elu_backward", "eq.Scalar", "eq.Tensor", "erf", "erfc", "erfinv"),
    *("exp", "exp2", "expm1", "floor", "fmax", "fmin", "fmod.Tensor", "frac", "ge.Scalar"),
    *("ge.Tensor", "gelu", "gelu_backward", "glu", "gt.Scalar", "gt.Tensor", "hardsigmoid"),
    *("hardsigmoid_backward", "hardtanh_backward", "hypot", "le.Scalar", "le.Tensor", "leaky_relu"),
    *("leaky_relu_backward", "lerp.Scalar", "lerp.Tensor", "lgamma", "log", "log10", "log1p"),
    *("log2", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "lt.Scalar"),
    *("lt.Tensor", "maximum", "minimum", "mish", "mul.Tensor", "nan_to_num", "ne.Scalar"),
    *("ne.Tensor", "neg", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal"),
    *("remainder.Tensor", "round", "rsqrt", "sgn", "sigmoid", "sigmoid_backward", "sign", "silu"),
    *("silu_backward", "sin", "sinc", "sinh", "softplus", "softplus_backward", "sqrt"),
    *("sub.Tensor", "tan", "tanh", "tanh_backward", "threshold", "threshold_backward", "trunc"),
    *("where.self", "xlogy.Tensor"),
)
_OTHERS = (
    *("_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "addbmm"),
    *("addmm", "addmv", "all.dim", "amax", "amin", "any.dim", "argmax", "argmin", "avg_pool2d"),
    *("avg_pool2d_backward", "baddbmm", "bmm", "cat", "cumprod", "cumsum", "gather"),
    *("index.Tensor", "index_add", "index_copy", "index_select", "linalg_vector_norm", "max.dim"),
    *("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "mean.dim", "min.dim", "mm"),
    # Not mse_loss: its out= form resizes the result to the shape of the inputs for a while.
    *("mse_loss_backward", "nll_loss2d_backward"),
    *("nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward", "prod.dim_int", "scatter.src"),
    *("scatter.value", "scatter_add", "sum.dim_IntList", "topk", "tril", "triu"),
    *("upsample_bilinear2d", "upsample_bilinear2d_backward", "upsample_nearest2d"),
    *("upsample_nearest2d_backward",),
)
WITH_OUT = frozenset((*_POINTWISE, *_OTHERS))
# Plain copies: their result is the argument, in another place and maybe in another dtype.
COPIES = frozenset({"clone", "_to_copy"})
# Where a kernel may do without regard to alignment, of all that torch calls: cuBLASLt looks up to
# this far when it chooses an algorithm. What the allocator gives has more.
_ALIGNMENT_BYTES = 256
_COPY_ALL = torch.ops.aten._foreach_copy_.default
_COPYING = (torch.ops.aten.copy_.default, _COPY_ALL)
_REDUCTIONS = ("graphfsdp::reduce_scatter_", "graphfsdp::all_reduce_")


@functools.cache
def short_name(op: OpOverload) -> str:
    """Return "mm" for aten::mm, "add.Tensor" for aten::add.Tensor; "" outside of aten."""
    if op.namespace != "aten":
        return ""
    name: str = schema_of(op).name.removeprefix("aten::")
    return f"{name}.{schema_of(op).overload_name}" if schema_of(op).overload_name else name


@functools.cache
def out_overload(op: OpOverload, device_type: str = "cpu") -> OpOverload | None:
    """Return the overload that takes the results as arguments, if such a device has a kernel.

    What torch generates (compute, then copy) is registered for all devices at once instead.
    """
    packet = op._overloadpacket
    wanted = [_form(argument) for argument in schema_of(op).arguments]
    for overload_name in packet.overloads():
        overload: OpOverload = getattr(packet, overload_name)
        arguments = schema_of(overload).arguments
        given = [_form(argument) for argument in arguments if not argument.is_out]
        num_outs = len(arguments) - len(given)
        if num_outs and num_outs == len(schema_of(op).returns) and given == wanted:
            return overload if has_kernel(overload.name(), device_type.upper()) else None
    return None


def _form(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)


class Trace:
    """The operators that an iteration has run, and the memory that they took; holds no tensor.

    Attributes:
        nodes: The operators, their arguments and results.
        at_home: Whether each of them ran on the iteration's own stream.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: whose streams they run on."""
        self.nodes: list[Node] = []
        self.at_home: list[bool] = []
        self._device = device
        self._home = self._stream()
        self._storages = StorageTable()
        self._numbers: dict[int, int] = {}  # of storages as they came, by id of the StorageInfo

    def run(self, call: OpCall) -> Any:
        """Run an operator, and write it down."""
        node = Node.of(call, self._value, site=0)
        node.effects = bool(call.written)
        result = call.run()
        node.outputs = [self._value(tensor, external=False) for tensor in flat_tensors([result])]
        self.nodes.append(node)
        self.at_home.append(self._is_at_home())
        return result

    def _is_at_home(self) -> bool:
        return self._stream() == self._home

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _value(self, tensor: Tensor, *, external: bool = True) -> Value | None:
        """Return None of a tensor without memory of its own.

        ``external``: if the storage was not seen before, the iteration has not made it.
        """
        if not storage_key(tensor):
            return None
        info = self._storages.known(tensor, "trace", external=external, varies=True)
        self._numbers.setdefault(id(info), len(self._numbers))
        return Value(info, geometry_of(tensor), None)

    def place(self, value: Value) -> tuple[int, Geometry]:
        """Return what a value is in this run and in any other that does the same."""
        return self._numbers[id(value.storage)], value.geometry


@dataclass(frozen=True)
class _LandingProduct:
    """A product that can be computed where it is to be copied to.

    Attributes:
        made: It, as its operator returned it.
        until: Index of the copy.
        number: Which of the tensors that are copied there it is.
        first_byte: Where in the storage.
        storage: Of the gradient; None as long as the iteration has not made it.
        empty: Index of the node that makes it then; else -1.
    """

    made: Value
    until: int
    number: int
    first_byte: int
    storage: torch.UntypedStorage | None
    empty: int

    @property
    def begin(self) -> int:
        assert self.storage is not None
        return self.storage.data_ptr() + self.first_byte

    def holds(self, tensor: Tensor) -> bool:
        return self.begin <= tensor.data_ptr() < self.begin + span_bytes(self.made)

    def tensor(self) -> Tensor:
        assert self.storage is not None
        with without_modes():  # this is none of the iteration's operators
            return materialise(self.made, self.storage, self.first_byte)


class Redirection(Trace):
    """Runs the operators of a capture that does what a warm-up did: those that land, elsewhere.

    Attributes:
        failure: Why the capture is refused.
    """

    def __init__(self, noted: Trace, gradients: Sequence[Tensor], device: torch.device) -> None:
        """``gradients`` look at all memory of the persistent gradients."""
        super().__init__(device)
        self.failure: CaptureError | None = None
        self._noted = noted
        targets = {key_of(tensor.untyped_storage()) for tensor in gradients}
        self._landings = dict(_landings(noted, targets))
        self._index = -1  # of the operator that runs
        self._ahead: dict[int, Tensor] = {}  # memory that the iteration asks for later, by index
        self._landed: dict[int, _LandingProduct] = {}  # by id of the StorageInfo that was noted
        self._follows = True

    def run(self, call: OpCall) -> Any:
        if not self._follows:
            return call.run()
        self._index += 1
        index, nodes = self._index, self._noted.nodes
        noted = nodes[index] if index < len(nodes) else None
        self._compare(noted, call)
        landed = [each for each in self._landed.values() if each.until == index]
        if noted is None or not self._follows:
            return call.run()
        if landed:
            if not all(_is_in_place(call, each) for each in landed):
                raise self._other_way(call)
            result = _copy_others(call, {each.number for each in landed})
        elif index in self._ahead and _is_called_alike(noted, call):
            result = self._ahead.pop(index)
        elif index in self._landings and _is_called_alike(noted, call):
            # Held by nobody else, or autograd would copy it instead of taking it.
            result = _run_into(call, self._land(self._landings[index]).tensor())
        else:
            result = call.run()
        is_same = self._is_same(noted.made, flat_tensors([result]), external=False)
        for each in landed:
            del self._landed[id(each.made.storage)]
        if not is_same:
            self._part(call)
        return result

    def finish(self) -> None:
        """CaptureError: the iteration was over before a product had reached its gradient."""
        if self._is_waiting():
            raise self._other_way(None)

    def _land(self, landing: _LandingProduct) -> _LandingProduct:
        if landing.storage is None:
            made = self._noted.nodes[landing.empty].outputs[0]
            if made is not None and landing.empty not in self._ahead:
                _, shape, stride, dtype, *_ = made.geometry
                self._ahead[landing.empty] = torch.empty_strided(
                    shape, stride, dtype=dtype, device=self._device
                )
            landing = replace(landing, storage=self._ahead[landing.empty].untyped_storage())
        self._landed[id(landing.made.storage)] = landing
        return landing

    def _compare(self, noted: Node | None, call: OpCall) -> None:
        same = (
            noted is not None
            and noted.op is call.op
            and self._is_same(noted.inputs, call.tensors)
            and self._noted.at_home[self._index] == self._is_at_home()
        )
        if not same:
            self._part(call)

    def _part(self, call: OpCall) -> None:
        if self._is_waiting():
            raise self._other_way(call)
        self._follows = False
        self._ahead.clear()  # the iteration makes its own, and nobody minds where products lie

    def _is_waiting(self) -> bool:
        """Tell whether something lies where the iteration expects it after a copy only."""
        return any(landed.empty not in self._ahead for landed in self._landed.values())

    def _other_way(self, call: OpCall | None) -> CaptureError:
        self.failure = CaptureError(
            "the iteration took another way with a gradient than its last warm-up did, in which it "
            "was computed and then only copied. Remedy: let each iteration do the same (more "
            "warmup_steps, if its first ones differ), or capture one step for each path",
            op=None if call is None else call.name,
            kind=HazardKind.CONTROL_FLOW,
        )
        return self.failure

    def _is_same(
        self, noted: Sequence[Value], now: Sequence[Tensor], *, external: bool = True
    ) -> bool:
        """Tell whether tensors are what they were in the warm-up: looks at the same storages."""
        held = [tensor for tensor in now if storage_key(tensor)]
        return len(held) == len(noted) and all(
            self._place_of(tensor, value, external=external) == self._noted.place(value)
            for tensor, value in zip(held, noted, strict=True)
        )

    def _place_of(self, tensor: Tensor, noted: Value, *, external: bool) -> tuple[int, Geometry]:
        """Where a product has landed in a gradient, a tensor is what it was in the warm-up."""
        landed = self._landed.get(id(noted.storage))
        if landed is None or not landed.holds(tensor):
            value = self._value(tensor, external=external)
            assert value is not None
            return self.place(value)
        number = self._numbers.setdefault(id(landed.made.storage), len(self._numbers))
        offset, *others = geometry_of(tensor)
        offset -= landed.first_byte // tensor.element_size()
        return number, (offset, *others)  # type: ignore[return-value]


def _landings(trace: Trace, gradients: Collection[int]) -> Iterator[tuple[int, _LandingProduct]]:
    """Yield what can be computed where it is copied to, by index of its operator.

    Of each product that is made in memory of its own, all of which is copied by the one operator
    that does more with it than look at it, and which nobody keeps. The target has the same form
    and is aligned, so that no kernel sees a place that eager mode would not give it; nobody touches
    it in between, and what has touched it before is over by then, by the order of its stream alone.
    """
    touches = touches_of(trace.nodes)
    buffers = _reduced_buffers(trace)
    products = {}
    for index, node in enumerate(trace.nodes):
        made = _made(node)
        if made is not None and _can_land(node.op) and is_plain(made):
            products[id(made.storage)] = index, made
    for until, number, target, source in _copies(trace):
        index, made = products.get(id(source.storage), (until, source))
        only_copied = [step for step, *_ in touches.get(id(source.storage), ())] == [until]
        if index == until or not only_copied or source.storage.alive:
            continue
        if not is_whole(source, span_bytes(made)) or source.geometry[1:] != target.geometry[1:]:
            continue
        begin, _ = places(target)
        storage, empty = None, buffers.get(id(target.storage), -1)
        if target.storage.external and target.storage.key in gradients:
            storage = target.storage.get()
        elif not index < empty < until:
            continue
        steps = before(touches, target, until)
        in_order = all(trace.at_home[step] for step in (index, until, *steps))
        is_free = not any(index <= step for step in steps)
        address = begin if storage is None else storage.data_ptr() + begin
        if in_order and is_free and address % _ALIGNMENT_BYTES == 0:
            yield index, _LandingProduct(made, until, number, begin, storage, empty)


def _reduced_buffers(trace: Trace) -> dict[int, int]:
    """Return by id of its StorageInfo which node makes the memory of what is reduced."""
    reduced = {
        id(value.storage)
        for node in trace.nodes
        if schema_of(node.op).name in _REDUCTIONS
        for value in node.inputs
    }
    return {
        id(value.storage): index
        for index, node in enumerate(trace.nodes)
        if is_empty(node.op) and trace.at_home[index]
        for value in node.made
        if id(value.storage) in reduced
    }


def _copies(trace: Trace) -> Iterator[tuple[int, int, Value, Value]]:
    """Yield each tensor that is copied: index of the node, its number there, target, source."""
    for index, node in enumerate(trace.nodes):
        if node.op in _COPYING:
            half = len(node.inputs) // 2
            for number, pair in enumerate(zip(node.inputs[:half], node.inputs[half:], strict=True)):
                yield index, number, *pair


def _made(node: Node) -> Value | None:
    """Return what an operator has made, if that is one tensor in memory of its own."""
    made = node.outputs[0] if len(node.outputs) == 1 else None
    if made is None or made.storage.external:
        return None
    return None if any(value.storage is made.storage for value in node.inputs) else made


def _copy_others(call: OpCall, landed: Collection[int]) -> Any:
    """Copy what has not landed; return what the operator would have."""
    pairs = list(zip(*call.args[:2], strict=True)) if call.op is _COPY_ALL else [call.args[:2]]
    for number in landed:
        torch.ops.aten.detach.default(pairs[number][0])  # a look at it, for whoever watches
    others = [pair for number, pair in enumerate(pairs) if number not in landed]
    if len(others) == 1:
        torch.ops.aten.copy_.default(*others[0])
    elif others:
        call.op(*map(list, zip(*others, strict=True)))
    return None if call.op is _COPY_ALL else call.args[0]


def _is_in_place(call: OpCall, landed: _LandingProduct) -> bool:
    pair = landed.number, landed.number + len(call.tensors) // 2
    return all(call.tensors[each].data_ptr() == landed.begin for each in pair)


@functools.cache
def _can_land(op: OpOverload) -> bool:
    name = short_name(op)
    return name in COPIES or (name in WITH_OUT and _into(op) is not None)


@functools.cache
def _into(op: OpOverload) -> tuple[OpOverload, str] | None:
    overload = out_overload(op, "cuda")
    if overload is None:
        return None
    names = [argument.name for argument in schema_of(overload).arguments if argument.is_out]
    return (overload, names[0]) if len(names) == 1 else None


def _run_into(call: OpCall, out: Tensor) -> Any:
    if short_name(call.op) in COPIES:
        return torch.ops.aten.copy_.default(out, call.args[0])
    found = _into(call.op)
    assert found is not None
    overload, name = found
    return overload(*call.args, **call.kwargs, **{name: out})


def _is_called_alike(noted: Node, call: OpCall) -> bool:
    """Tell whether the other arguments are the same, and autograd needs nothing of the call."""
    before = replaced([noted.args, sorted(noted.kwargs.items())], Value, _nothing)
    now = replaced([call.args, sorted(call.kwargs.items())], Tensor, _nothing)
    return not torch.is_grad_enabled() and repr(before) == repr(now)


def _nothing(_: object) -> None:
    return None
