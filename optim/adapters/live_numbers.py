"""Numbers that an optimizer's Python computes in each step and writes into tensors, kept live.

Some optimizers count steps in Python, and hand what they compute of that, and of the numbers in
their groups, to compiled functions as 0-D tensors (``tensor.fill_(number)``). While such a step is
recorded its numbers are objects that note how they are computed. What is filled in comes from
memory that a recording reads, and is computed anew, in Python, before each replay.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partialmethod
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphfsdp.base.hazards import HazardKind
from graphfsdp.base.streams import is_capturing
from graphfsdp.base.torch_internals import without_modes
from graphfsdp.errors import CaptureError
from graphfsdp.optim.fused.hyper_table import LiveMemory

_Compute = Callable[[], Any]
_BLOCK = 256  # numbers


def is_live(value: object) -> bool:
    """Tell whether a value of a group is live: a float, or a list or tuple with some.

    Whole numbers there say how often something is done, or of which kind it is.
    """
    if type(value) in (tuple, list):
        return any(isinstance(each, float) for each in cast(Sequence[object], value))
    return isinstance(value, float)


def numbers_in(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in entries.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


@contextmanager
def in_groups(
    groups: Sequence[dict[str, Any]], given: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Have other values in these very groups while the body runs; what that writes stays."""
    before = [{key: group[key] for key in new} for group, new in zip(groups, given, strict=True)]
    for group, new in zip(groups, given, strict=True):
        group.update(new)
    try:
        yield
    finally:
        for group, new, old in zip(groups, given, before, strict=True):
            group.update({key: old[key] for key in new if group.get(key) is new[key]})


class LiveNumber:
    """Stands for a number: knows its value now, and how to compute it another time.

    Not a float: what would take the plain value of one without asking cannot take this. As a whole
    number, or a key, it is no use: steps count on.
    """

    __slots__ = ("compute", "slot", "tape", "value")

    def __init__(self, tape: "Tape", value: Any, compute: _Compute) -> None:
        self.tape = tape
        self.value = value
        self.compute = compute
        self.slot: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not Tensor.fill_ or not isinstance(args[1], LiveNumber):
            name = getattr(func, "__name__", str(func))
            raise TypeError(f"{name}() takes no LiveNumber")
        return args[0].copy_(args[1].tape.fill(args[1], args[0].device))

    def _of(self, function: Callable[..., Any], *operands: object) -> Any:
        values = [each.value if isinstance(each, LiveNumber) else each for each in operands]
        if not all(isinstance(value, int | float) for value in values):
            return NotImplemented
        computes = [_compute_of(each) for each in operands]
        value = function(*values)
        return LiveNumber(self.tape, value, lambda: function(*(each() for each in computes)))

    def _fixed(self, function: Callable[..., Any], *others: object) -> Any:
        """Return a plain value, which no replay may have otherwise."""
        found = self._of(function, self, *others)
        return found if found is NotImplemented else self.tape.fix(found)

    def _with(self, function: Callable[..., Any], other: object) -> Any:
        return self._of(function, self, other)

    def _behind(self, function: Callable[..., Any], other: object) -> Any:
        return self._of(function, other, self)

    __add__, __radd__ = (partialmethod(each, operator.add) for each in (_with, _behind))
    __sub__, __rsub__ = (partialmethod(each, operator.sub) for each in (_with, _behind))
    __mul__, __rmul__ = (partialmethod(each, operator.mul) for each in (_with, _behind))
    __truediv__, __rtruediv__ = (partialmethod(each, operator.truediv) for each in (_with, _behind))
    __pow__, __rpow__ = (partialmethod(each, operator.pow) for each in (_with, _behind))
    __lt__, __le__ = partialmethod(_fixed, operator.lt), partialmethod(_fixed, operator.le)
    __gt__, __ge__ = partialmethod(_fixed, operator.gt), partialmethod(_fixed, operator.ge)
    __eq__ = partialmethod(_fixed, operator.eq)
    __ne__ = partialmethod(_fixed, operator.ne)

    def __neg__(self) -> Any:
        return self._of(operator.neg, self)

    def __bool__(self) -> bool:
        return bool(self._fixed(bool))

    def __float__(self) -> float:
        return float(self._fixed(float))


def _compute_of(operand: object) -> _Compute:
    return operand.compute if isinstance(operand, LiveNumber) else lambda: operand


class Slots:
    """Memory that recordings read numbers from, in blocks that stay where they are."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        """``dtype`` is that of other devices than a CPU."""
        self._dtype = dtype
        self._blocks: list[LiveMemory] = []  # [_BLOCK] each
        self._changed: set[int] = set()  # blocks

    def write(self, index: int, value: float) -> None:
        block, place = divmod(index, _BLOCK)
        if block == len(self._blocks):
            self._blocks.append(LiveMemory(_BLOCK, dtype=self._dtype))
        host = self._blocks[block].host
        if host[place] != value:
            host[place] = value
            self._changed.add(block)

    def upload(self) -> None:
        """Bring to the devices what was written. Capture: no part of it."""
        for block in self._changed:
            self._blocks[block].upload()
        self._changed.clear()

    def get(self, index: int, device: torch.device) -> Tensor:
        """Return [] with the number that was written, after an upload."""
        block, place = divmod(index, _BLOCK)
        memory = self._blocks[block].on(device)
        if self._changed and memory.is_cuda and is_capturing():
            raise CaptureError(
                "the optimizer's step computes other numbers in the capture than its last "
                "warm-up would have; a replay would write these for ever. Remedy: "
                "scope='forward_backward', which leaves the optimizer outside the graph",
                kind=HazardKind.OPTIMIZER,
            )
        self.upload()
        with torch.no_grad(), without_modes():
            return memory[place]


class Tape:
    """What became of an optimizer's numbers in one iteration.

    Attributes:
        fixed: How each plain value is computed that was taken out, and what it was.
        moves: How each number of a parameter's state is computed that the iteration has changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, slots: Slots) -> None:
        self._optimizer = optimizer
        self._name = name
        self._slots = slots
        self._filled: list[_Compute] = []
        self.fixed: list[tuple[_Compute, Any]] = []
        self.moves: dict[tuple[Tensor, str], _Compute] = {}

    def fill(self, number: LiveNumber, device: torch.device) -> Tensor:
        """Return [] with a number's value, which ``write`` writes anew."""
        if number.slot is None:
            self._slots.write(len(self._filled), number.value)
            number.slot = self._slots.get(len(self._filled), device)
            self._filled.append(number.compute)
        return number.slot

    def fix(self, number: LiveNumber) -> Any:
        self.fixed.append((number.compute, number.value))
        return number.value

    def same_path(self, other: "Tape") -> bool:
        """Tell whether two iterations have taken the same values out, and filled as many in."""
        mine, its = ([value for _, value in tape.fixed] for tape in (self, other))
        return mine == its and len(self._filled) == len(other._filled)

    def changed(self) -> tuple[Any, Any] | None:
        """Return a value that was taken out, and what it would be now; None if all are the same."""
        for compute, value in self.fixed:
            now = compute()
            if now != value:
                return value, now
        return None

    def write(self) -> None:
        """Compute anew what is filled in. Capture: no part of a recording."""
        for index, compute in enumerate(self._filled):
            self._slots.write(index, compute())
        self._slots.upload()

    def next_state(self) -> list[tuple[Tensor, str, Any]]:
        """Return what the iteration would make of the counts that there are now."""
        return [(param, key, compute()) for (param, key), compute in self.moves.items()]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have live numbers in groups and state while the body, a step, runs."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        given = [self._of_group(index, group) for index, group in enumerate(groups)]
        counts = {param: self._of_state(param, entries) for param, entries in state.items()}
        for param, new in counts.items():
            state[param].update(new)
        try:
            with in_groups(groups, given):
                yield
        except TypeError as error:
            if "LiveNumber" not in str(error):
                raise
            raise CaptureError(
                f"{self._name} counts its steps in Python and gives a number to an operator that "
                f"would hold it for ever ({error}). Remedy: write it into a 0-D tensor with "
                "fill_(), which replays do anew; scope='forward_backward', which leaves the "
                "optimizer outside the graph; or graphfsdp.optim.FusedAdam",
                kind=HazardKind.OPTIMIZER,
            ) from None
        finally:
            for group in groups:
                group.update(_plain(group))
            for param, entries in state.items():
                known = counts.get(param, {})
                for key, value in entries.items():
                    if isinstance(value, LiveNumber) and value is not known.get(key):
                        self.moves[param, key] = value.compute
                entries.update(_plain(entries))

    def _of_group(self, index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        def number(key: str, value: float) -> LiveNumber:
            return LiveNumber(self, value, lambda: self._optimizer.param_groups[index][key])

        def item(key: str, place: int, value: Any) -> Any:
            if not isinstance(value, float):
                return value
            return LiveNumber(self, value, lambda: self._optimizer.param_groups[index][key][place])

        found: dict[str, Any] = {}
        for key, value in group.items():
            if isinstance(value, float):
                found[key] = number(key, value)
            elif is_live(value):
                found[key] = type(value)(item(key, i, each) for i, each in enumerate(value))
        return found

    def _of_state(self, param: Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
        def number(key: str, value: Any) -> LiveNumber:
            known = self.moves.get((param, key))  # by a step of the same iteration before
            return LiveNumber(self, value, known or (lambda: self._optimizer.state[param][key]))

        return {key: number(key, value) for key, value in numbers_in(entries).items()}


def _plain(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.value for key, value in entries.items() if isinstance(value, LiveNumber)}


class LiveScalars(TorchFunctionMode):
    """Keeps on the device what optimizers take for numbers of Python.

    The plain path of torch's reads the step count, computes with it in Python and hands the result
    to operators as ``alpha`` or ``value``. A read gives a 0-D tensor in Python's precision here;
    an operator that takes numbers only is called as one that takes tensors: with the same bits.

    A number takes the dtype of the tensor that it meets. 0-D tensors do so where the other has
    dimensions; where it has none either (an lr that is a tensor, the product of NAdam's momenta)
    the stand-ins for numbers are known, and cast before they meet it.
    """

    def __init__(self, rates: Iterable[Tensor | None] = (), *, reads_late: bool = False) -> None:
        """``rates``: [] each, tensors that stand for numbers of the groups.

        ``reads_late``: operators of a CPU may read numbers when they run.
        """
        super().__init__()
        self._reads_late = reads_late
        self._numbers = {id(rate): rate for rate in rates if rate is not None}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "item":
            return self._number(args[0].to(torch.float64, copy=True))
        factor = kwargs.get(_FACTORS.get(name, ""))
        if not isinstance(factor, Tensor):
            if name == "div" and self._is_number(args[0]) and not self._is_number(args[1]):
                # So torch divides a number by a tensor.
                func, args = Tensor.mul, (args[1].reciprocal(), args[0])
            return self._compute(func, args, kwargs)
        target, *others = args
        if others[0].is_sparse:  # what no graph holds, and the plain step of before may be given
            return func(*args, **{**kwargs, _FACTORS[name]: factor.item()})
        # In 16 bits what is added is rounded once or twice, by its place in memory.
        reads_late = self._reads_late and not torch.is_grad_enabled()
        if target.dtype.itemsize < 4 and reads_late and type(target) in _ON_A_CPU:
            with_factor_(target, others, factor, name)
            return target
        # The others are computed in float32 there, and rounded once.
        if target.dtype.itemsize < 4 and name != "add_":
            wide = [tensor.float() for tensor in (target, *others)]
            self.__torch_function__(func, types, wide, kwargs)
            return target.copy_(wide[0])
        factor = factor.to(target.dtype)
        if name == "add_":
            return target.addcmul_(others[0], factor)
        return func(target, others[0] * factor, *others[1:])

    def _compute(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        others = [tensor for tensor in tensors if not self._is_number(tensor)]
        if not tensors or len(others) == len(tensors):
            return func(*args, **kwargs)
        if not others:
            result = func(*args, **kwargs)
            return self._number(result) if isinstance(result, Tensor) else result
        if any(tensor.dim() for tensor in others):
            return func(*args, **kwargs)
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in others))
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        # In 16 bits numbers are not rounded before what is computed with them is.
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        met = [arg.to(wide) if self._is_number(arg) else arg for arg in args]
        result = func(*met, **kwargs)
        return result.to(dtype) if isinstance(result, Tensor) and result.dtype is wide else result

    def _is_number(self, operand: object) -> bool:
        return id(operand) in self._numbers

    def _number(self, result: Tensor) -> Tensor:
        self._numbers[id(result)] = result
        return result


_FACTORS: Mapping[str, str] = MappingProxyType(
    {"add_": "alpha", "addcdiv_": "value", "addcmul_": "value"}
)


def _with_factor(target: Tensor, others: list[Tensor], factor: Tensor, name: str) -> None:
    getattr(target, name)(*others, **{_FACTORS[name]: factor.item()})


_ON_A_CPU = (Tensor, nn.Parameter)
_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")  # a registration lives as long as it
_LIBRARY.define("with_factor_(Tensor(a!) target, Tensor[] others, Tensor factor, str name) -> ()")
_LIBRARY.impl("with_factor_", _with_factor, "CPU")
with_factor_: Callable[..., None] = torch.ops.graphfsdp.with_factor_.default
