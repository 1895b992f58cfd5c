"""Has gradients computed where they are to be copied to, while an iteration is captured.

Note [Landing]: a program of a CPU leaves copies into persistent gradients out (elision.py). A CUDA
graph is not rewritten: what the last warm-up did is written down, and when the capture comes to a
product that was only copied into a gradient, the operator is called with ``out=`` that gradient,
and the copy is left out. Every operator of the capture is compared with that of the warm-up before
it runs, by the memory that it is given. Where they part, nothing is redirected any more; if they do
while a product waits in a gradient for its copy, the capture is refused.

What no ``out=`` can avoid (gradients of norms, say) is copied by one kernel at the end of the
backward pass, where it is small and no operator looks at the gradient before. Kernels that are no
operators are not seen here: where such a one may look at a gradient before the end, no copy waits.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from graphfsdp._capture.trace.elision import (
    ElidedCopy,
    Touch,
    addresses,
    copies_to,
    elided_copies,
    is_plain,
    touches_of,
)
from graphfsdp._capture.trace.out_forms import COPIES, WITH_OUT, out_overload, short_name
from graphfsdp._capture.trace.values import (
    Geometry,
    Node,
    StorageTable,
    Value,
    geometry_of,
    has_storage,
    materialise,
    span_bytes,
)
from graphfsdp.base.hazards import HazardKind
from graphfsdp.base.memory_plan import Lifetime
from graphfsdp.base.op_tensors import OpCall, flat_tensors
from graphfsdp.errors import CaptureError

# Where a kernel may do without regard to alignment, of all that torch calls: cuBLASLt looks up to
# this far when it chooses an algorithm. What the allocator gives has more.
_ALIGNMENT_BYTES = 256
# Gradients that wait for the end of the backward pass take memory beside their buffers.
_LATE_BYTES = 16 << 20


class Trace:
    """What an iteration did, operator by operator; holds no tensor.

    Attributes:
        nodes: The operators; their arguments are all tensors, lists opened.
        at_home: Whether each of them ran on the iteration's own stream.
        plain: Other arguments, by index, of those that may be redirected.
    """

    def __init__(self, home: int) -> None:
        self.nodes: list[Node] = []
        self.at_home: list[bool] = []
        self.plain: dict[int, list[str]] = {}
        self._home = home
        self._storages = StorageTable()
        self._numbers: dict[int, int] = {}  # of storages as they came, by id of the StorageInfo

    def run(self, call: OpCall) -> Any:
        """Run an operator, and write it down."""
        arguments = self.values(call.tensors)
        result = call.run()
        self.add(call, arguments, result)
        return result

    def add(self, call: OpCall, arguments: list[Value], result: Any) -> Node:
        made = self.values(flat_tensors([result]), external=False)
        node = Node(call.op, [*arguments], {}, [*made], "", effects=bool(call.written))
        if _can_land(call.op):
            self.plain[len(self.nodes)] = _plain(call)
        self.nodes.append(node)
        self.at_home.append(self.is_at_home(call))
        return node

    def is_at_home(self, call: OpCall) -> bool:
        return _stream_of(call.tensors) in (self._home, None)

    def values(self, tensors: Sequence[Tensor], *, external: bool = True) -> list[Value]:
        return [self.value(each, external=external) for each in tensors if has_storage(each)]

    def value(self, tensor: Tensor, *, external: bool = True) -> Value:
        """``external``: if the storage was not seen before, the iteration has not made it."""
        info = self._storages.find(tensor, "trace")
        if info is None:
            info = self._storages.add(tensor, "trace", external=external, varies=True)
        self._numbers.setdefault(id(info), len(self._numbers))
        return Value(info, geometry_of(tensor), None)

    def place(self, value: Value) -> tuple[int, Geometry]:
        """Return what a value is in this run and in any other that does the same."""
        return self._numbers[id(value.storage)], value.geometry


@dataclass(frozen=True)
class _Landing:
    """A product that is computed in a gradient: ``made`` as its operator returned it."""

    made: Value
    copy: ElidedCopy

    @property
    def begin(self) -> int:
        return self.copy.storage.data_ptr() + self.copy.first_byte

    @property
    def end(self) -> int:
        return self.begin + span_bytes(self.made)

    def place(self) -> Tensor:
        with _disable_current_modes():  # this is none of the iteration's operators
            return materialise(self.made, self.copy.storage, self.copy.first_byte)


class Landing:
    """Notes warm-ups, and redirects captures that do the same as the last of them."""

    def __init__(self, gradients: Sequence[Tensor], *, may_wait: bool) -> None:
        """``gradients`` look at all memory of the persistent gradients.

        ``may_wait``: nobody but the iteration's own operators uses them before its end.
        """
        self._gradients = gradients
        self._may_wait = may_wait
        self._noted: Trace | None = None

    def noting(self) -> Trace:
        self._noted = Trace(_stream_of(self._gradients) or 0)
        return self._noted

    def redirecting(self) -> "Redirection | None":
        """Return what runs the operators of a capture; None if nothing was noted."""
        noted = self._noted
        if noted is None:
            return None
        touches = _touches(noted)
        lives = _lives(noted, touches)
        found = elided_copies(noted.nodes, lives, self._gradients, _ALIGNMENT_BYTES)
        at_gradients = touches_of(noted.nodes, self._gradients)
        landings = {}
        for index, node in enumerate(noted.nodes):
            made = _made(node)
            if made is not None and id(made.storage) in found:
                landing = _Landing(made, found[id(made.storage)])
                if _is_in_order(noted, index, landing, at_gradients):
                    landings[index] = landing
        late = set(self._late(noted, touches, at_gradients)) if self._may_wait else set()
        late.difference_update(landing.copy.index for landing in landings.values())
        return Redirection(noted, landings, late, _stream_of(self._gradients) or 0)

    def _late(
        self, noted: Trace, touches: Mapping[int, Sequence[int]], at_gradients: Sequence[Touch]
    ) -> Iterator[int]:
        """Yield the small copies to gradients that may as well be made at the end, by index."""
        num_bytes = 0
        for index, target, source in copies_to(noted.nodes, self._gradients):
            storage, (begin, end) = source.storage, addresses(target)
            is_last = touches[id(storage)][-1] == index and not storage.alive
            if storage.external or not is_last or not noted.at_home[index]:
                continue
            after = (touch for touch in at_gradients if touch[0] > index)
            if any(low < end and begin < high for _, low, high in after):
                continue
            if num_bytes + span_bytes(source) <= _LATE_BYTES:
                num_bytes += span_bytes(source)
                yield index


class Redirection(Trace):
    """Runs the operators of a capture, those that land where they land.

    Attributes:
        failure: Why the capture is refused.
    """

    def __init__(
        self, noted: Trace, landings: Mapping[int, _Landing], late: Collection[int], home: int
    ) -> None:
        """``late`` are copies that may wait for the end, by index."""
        super().__init__(home)
        self._noted = noted
        self._landings = landings
        self._late = late
        self._waiting: list[tuple[Tensor, Tensor]] = []  # for the end: target and source
        self._pending: dict[int, _Landing] = {}  # by index of the copy
        self._follows = True
        self.failure: CaptureError | None = None

    def run(self, call: OpCall) -> Any:
        if not self._follows:
            return call.run()
        index = len(self.nodes)
        copied = self._pending.pop(index, None)
        arguments = self._arguments(call, copied)
        self._compare(index, call, arguments)
        if copied is not None:
            if not _is_in_place(call, copied):
                raise self._other_way(call)
            result = _left_out(call)
        elif index in self._late and self._follows:
            self._waiting.append((call.args[0], call.args[1]))
            result = _left_out(call)
        elif self._lands(index, call):
            landing = self._landings[index]
            self._pending[landing.copy.index] = landing
            # Held by nobody else, or autograd would copy it instead of taking it.
            result = _run_into(call, landing.place())
        else:
            result = call.run()
        if self._follows:
            node = self.add(call, arguments, result)
            self._compare_results(index, call, node)
        return result

    def finish(self) -> None:
        """CaptureError: the iteration was over before a product had reached its gradient."""
        if self._pending:
            raise self._other_way(None)
        self._copy_late()

    def _copy_late(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            targets, sources = zip(*waiting, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    def value(self, tensor: Tensor, *, external: bool = True) -> Value:
        landing = self._landing_at(tensor)
        if landing is None:
            return super().value(tensor, external=external)
        self._numbers.setdefault(id(landing.made.storage), len(self._numbers))
        offset, *others = geometry_of(tensor)
        offset -= landing.copy.first_byte // tensor.element_size()
        return Value(landing.made.storage, (offset, *others), None)  # type: ignore[arg-type]

    def _landing_at(self, tensor: Tensor) -> _Landing | None:
        address = tensor.data_ptr() if self._pending else 0
        for landing in self._pending.values():
            if landing.begin <= address < landing.end:
                return landing
        return None

    def _arguments(self, call: OpCall, copied: _Landing | None) -> list[Value]:
        if copied is None:
            return self.values(call.tensors)
        # The gradient as it is, and then what has landed there.
        target = super().value(call.tensors[0])
        self._pending[-1] = copied
        source = self.values(call.tensors[1:])
        del self._pending[-1]
        return [target, *source]

    def _lands(self, index: int, call: OpCall) -> bool:
        if index not in self._landings or not self._follows or torch.is_grad_enabled():
            return False
        return self._noted.plain.get(index) == _plain(call)

    def _compare(self, index: int, call: OpCall, arguments: Sequence[Value]) -> None:
        noted = self._noted.nodes[index] if index < len(self._noted.nodes) else None
        same = noted is not None and noted.op is call.op and self._is_same(noted.args, arguments)
        if not same or self._noted.at_home[index] != self.is_at_home(call):
            self._part(call)

    def _compare_results(self, index: int, call: OpCall, node: Node) -> None:
        made = [value for value in node.outputs if value is not None]
        noted = [value for value in self._noted.nodes[index].outputs if value is not None]
        if not self._is_same(noted, made):
            self._part(call)

    def _part(self, call: OpCall) -> None:
        if self._pending or (self._waiting and not self.is_at_home(call)):
            raise self._other_way(call)
        self._follows = False
        self._copy_late()

    def _other_way(self, call: OpCall | None) -> CaptureError:
        self.failure = CaptureError(
            "the iteration took another way with a gradient than its last warm-up did, in which it "
            "was computed and then only copied. Remedy: let each iteration do the same (more "
            "warmup_steps, if its first ones differ), or capture one step for each path",
            op=None if call is None else call.name,
            kind=HazardKind.CONTROL_FLOW,
        )
        return self.failure

    def _is_same(self, noted: Sequence[Value], now: Sequence[Value]) -> bool:
        places = [self._noted.place(value) for value in noted]
        return places == [self.place(value) for value in now]


def _touches(trace: Trace) -> dict[int, list[int]]:
    """Return which nodes do more with a storage than look at it, by id of its StorageInfo."""
    touches: dict[int, list[int]] = {}
    for index, node in enumerate(trace.nodes):
        given = {id(value.storage) for value in node.args}
        made = {id(value.storage) for value in node.outputs if value is not None}
        if node.effects or not made or not made <= given:
            for key in given:
                touches.setdefault(key, []).append(index)
    return touches


def _lives(trace: Trace, touches: Mapping[int, Sequence[int]]) -> dict[int, Lifetime]:
    """Return when a storage is made and copied, of those with which nothing else is done."""
    lives = {}
    for index, node in enumerate(trace.nodes):
        made = _made(node)
        if made is None or not _can_land(node.op) or not is_plain(made):
            continue
        uses = touches.get(id(made.storage), ())
        # What somebody keeps has to stay where it is.
        if len(uses) == 1 and not made.storage.alive:
            lives[id(made.storage)] = Lifetime(index, uses[0], span_bytes(made))
    return lives


def _made(node: Node) -> Value | None:
    """Return what an operator has made, if that is one tensor in memory of its own."""
    made = node.outputs[0] if len(node.outputs) == 1 else None
    if made is None or made.storage.external:
        return None
    return None if any(value.storage is made.storage for value in node.args) else made


def _is_in_order(trace: Trace, index: int, landing: _Landing, touched: Sequence[Touch]) -> bool:
    """Tell whether what has touched the gradient before is over by then, by its stream alone."""
    until = landing.copy.index
    steps = (step for step, low, high in touched if low < landing.end and landing.begin < high)
    return all(trace.at_home[step] for step in (index, until, *steps) if step <= until)


def _left_out(call: OpCall) -> Tensor:
    """Return what a copy would have, which whoever watches sees as a look at it."""
    target: Tensor = call.args[0]
    torch.ops.aten.detach.default(target)
    return target


def _is_in_place(call: OpCall, landing: _Landing) -> bool:
    return all(each.data_ptr() == landing.begin for each in call.tensors)


def _stream_of(tensors: Sequence[Tensor]) -> int | None:
    """Return the current stream of the first tensor that has one."""
    for tensor in tensors:
        if tensor.is_cuda:
            return int(torch.cuda.current_stream(tensor.device).cuda_stream)
    return None


@functools.cache
def _can_land(op: torch._ops.OpOverload) -> bool:
    name = short_name(op)
    return name in COPIES or (name in WITH_OUT and _into(op) is not None)


@functools.cache
def _into(op: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, str] | None:
    overload = out_overload(op, "cuda")
    if overload is None:
        return None
    names = [argument.name for argument in overload._schema.arguments if argument.is_out]
    return (overload, names[0]) if len(names) == 1 else None


def _run_into(call: OpCall, out: Tensor) -> Any:
    if short_name(call.op) in COPIES:
        return torch.ops.aten.copy_.default(out, call.args[0])
    found = _into(call.op)
    assert found is not None
    overload, name = found
    return overload(*call.args, **call.kwargs, **{name: out})


def _plain(call: OpCall) -> list[str]:
    items = (*call.args, *(item for pair in sorted(call.kwargs.items()) for item in pair))
    return ["tensors" if flat_tensors([item]) else repr(item) for item in items]
