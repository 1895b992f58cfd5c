"""What the loop does in an iteration: calls, with their arguments as places of values."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, is_dataclass
from itertools import groupby
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from graphfsdp._capture.trace.source import user_source_line
from graphfsdp._capture.undo.interrupts import run_users
from graphfsdp.base.hazards import HazardKind, SourceLine
from graphfsdp.base.op_tensors import is_wrapper_subclass
from graphfsdp.base.sharded import ShardedUnit
from graphfsdp.base.torch_internals import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from graphfsdp.errors import CaptureError, first_line
from graphfsdp.in_place.forms import Form

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
# What a loop may give a call besides tensors; it is compared in each iteration.
CONSTANT = (*PLAIN, slice, type(Ellipsis), torch.Generator, torch.memory_format, torch.layout)
_TENSORS = (Tensor, nn.Parameter)
MOST_NEW = 8  # iterations in a row: then the next one is new, too
LATER = "put it behind optimizer.step()"
LAST = "put it behind the step of the last optimizer"  # where others have stepped already
_Leaf = Any


@dataclass(frozen=True)
class Made:
    """A value that the iteration makes, by its place."""

    index: int


@dataclass(frozen=True)
class Given:
    """A tensor from outside, by its place among the iteration's inputs."""

    index: int


@dataclass(frozen=True, eq=False)
class Own:
    """A parameter or buffer of the models."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


@dataclass(frozen=True)
class Result:
    """A tensor that a call returns: its place among what the iteration makes.

    ``root`` is the place of the tensor in whose memory it lies, or the models' own tensor;
    ``written`` is the place of a tensor from outside which the call has written (a sum that runs
    on) and returns.
    """

    index: int
    form: Form
    root: "int | Own"
    offset: int
    written: int | None = None

    def lying_in(self, memory: Tensor) -> Tensor:
        """Return it as a look at the memory of its root."""
        form = self.form
        look = torch.empty(0, dtype=form.dtype, device=form.device)
        return look.set_(memory.untyped_storage(), self.offset, form.shape, form.stride)


class Unknown:
    """Stands for what a module returns besides tensors and plain values."""

    def __getattr__(self, name: str) -> NoReturn:
        raise CaptureError(
            f"the loop reads {name!r} of an object that a captured module returned, which a replay "
            f"does not make. Remedy: return tensors, or {LATER}",
            source=user_source_line(),
        )


@dataclass(frozen=True)
class Modes:
    """What torch is told to do by contexts around a call.

    ``block`` numbers the outermost autocast: casts of weights are kept to its end. ``settings`` are
    those of the sharded units.
    """

    grad: bool
    block: int
    autocast: tuple[torch.dtype, bool] | None  # dtype, and whether casts are kept
    settings: tuple[Any, ...]

    @classmethod
    def now(cls, kind: str, block: int, units: Sequence[ShardedUnit]) -> "Modes":
        cast = None
        if torch.is_autocast_enabled(kind):
            cast = (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        return cls(torch.is_grad_enabled(), block, cast, tuple(unit.settings for unit in units))


@dataclass
class Call:
    """One thing that the loop does: ``key`` tells it from others, ``results`` what it returns."""

    function: Callable[..., Any]
    leaves: list[_Leaf]
    spec: TreeSpec | None  # None: the leaves are the arguments
    modes: Modes
    forms: list[Form]  # of the tensors that are given to it
    results: list[Any] = field(default_factory=list)  # Result, Own, Given, or the value
    result_spec: TreeSpec | None = None  # None: the result is one leaf
    source: SourceLine | None = None  # of the loop

    def is_like(self, other: "Call") -> bool:
        return (
            self.function == other.function
            and self.modes == other.modes
            and self.forms == other.forms
            and self.spec == other.spec
            and all(map(same, self.leaves, other.leaves))
        )

    def run(self, made: dict[int, Any], given: Sequence[Tensor]) -> Any:
        """Do it, with these values; note what it makes."""

        def value(leaf: _Leaf) -> Any:
            if isinstance(leaf, Made):
                return made[leaf.index]
            if isinstance(leaf, Given):
                return given[leaf.index]
            return leaf.tensor if isinstance(leaf, Own) else leaf

        values = [value(leaf) for leaf in self.leaves]
        args, kwargs = values, {}
        if self.spec is not None:
            args, kwargs = tree_unflatten(values, self.spec)
        with torch.set_grad_enabled(self.modes.grad):
            result = run_users(_from_line(self.source), self.function, args, kwargs)
        if self.results:
            for place, leaf in zip(self.results, flattened(result)[0], strict=True):
                if isinstance(place, Result):
                    made[place.index] = leaf
        return result


def flat(args: Any, kwargs: Any) -> tuple[Sequence[Any], TreeSpec | None]:
    """Return all leaves and how they are nested, which few calls of torch functions are."""
    if not kwargs and all(isinstance(value, CONSTANT) or type(value) in _TENSORS for value in args):
        return args, None
    return flattened((args, kwargs))


@dataclass(frozen=True)
class _Record:
    """An instance of a dataclass as a node of a tree, which it is made again of."""

    value: Any

    def parts(self) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
        names = vars(self.value) if hasattr(self.value, "__dict__") else self.value.__slots__
        return [_opened(getattr(self.value, n)) for n in names], (type(self.value), tuple(names))

    @staticmethod
    def made_of(parts: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
        kind, names = context
        made: Any = object.__new__(kind)
        for name, value in zip(names, parts, strict=True):
            object.__setattr__(made, name, value)
        return made


register_pytree_node(_Record, _Record.parts, _Record.made_of)


def _opened(tree: Any) -> Any:
    return tree_map(lambda leaf: _Record(leaf) if _is_record(leaf) else leaf, tree)


def _is_record(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, type)


def flattened(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Do what ``tree_flatten`` does, and look into dataclasses that it does not know."""
    leaves, spec = tree_flatten(tree)
    if any(map(_is_record, leaves)):
        leaves, spec = tree_flatten(_opened(tree))
    return leaves, spec


def same(one: _Leaf, other: _Leaf) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


@dataclass
class Point:
    """What the loop has done so far, and what may come next."""

    call: Call | None = None
    before: "Point | None" = None
    following: list["Point"] = field(default_factory=list)
    draws: frozenset[int] = frozenset()  # places of generators that its calls have drawn from
    drawn_at: SourceLine | None = None  # where the loop itself drew behind this call

    def calls(self) -> list[Call]:
        found = []
        point: Point | None = self
        while point is not None and point.call is not None:
            found.append(point.call)
            point = point.before
        return found[::-1]


@dataclass
class Program:
    """What one captured iteration does, and which of its values it returns.

    ``flags`` is what was trained at its beginning, of what its calls say that of.
    """

    calls: list[Call]
    kept: list[int]
    end: Point
    flags: list[tuple[Own, bool]]

    def run(self, given: Sequence[Tensor], kind: str, units: Sequence[ShardedUnit]) -> list[Any]:
        results = [leaf for call in self.calls for leaf in call.results]
        written = {leaf.written for leaf in results if isinstance(leaf, Result)}
        given = [t.clone() if place in written else t for place, t in enumerate(given)]
        for own, flag in self.flags:
            own.tensor.requires_grad_(flag)
        made = run_calls(self.calls, given, kind, units)
        return [made[index] for index in self.kept]


def run_calls(
    calls: Sequence[Call], given: Sequence[Tensor], kind: str, units: Sequence[ShardedUnit]
) -> dict[int, Any]:
    made: dict[int, Any] = {}
    now = [unit.settings for unit in units]
    try:
        _run_blocks(calls, given, kind, units, made)
    finally:
        _set(units, now)
    return made


def _set(units: Sequence[ShardedUnit], settings: Sequence[Any]) -> None:
    for unit, values in zip(units, settings, strict=True):
        unit.settings = values


def _run_blocks(
    calls: Sequence[Call],
    given: Sequence[Tensor],
    kind: str,
    units: Sequence[ShardedUnit],
    made: dict[int, Any],
) -> None:
    for _, block in groupby(calls, key=lambda call: call.modes.block):
        with torch.autocast(kind, enabled=False):  # the outermost one: its end forgets casts
            for cast, group in groupby(block, key=lambda call: call.modes.autocast):
                context: Any = nullcontext()
                if cast is not None:
                    context = torch.autocast(kind, cast[0], cache_enabled=cast[1])
                with context:
                    for call in group:
                        _set(units, call.modes.settings)
                        call.run(made, given)


_CALL = lambda function, args, kwargs: function(*args, **kwargs)  # noqa: E731 (it is one line)


def _from_line(source: SourceLine | None) -> Callable[..., Any]:
    """Return what calls a function as if from there: what looks for the user's line finds it."""
    if source is None:
        return _CALL
    code = _CALL.__code__.replace(
        co_filename=source.file,
        co_firstlineno=source.line,
        co_name=source.function.rpartition(".")[2],
        co_qualname=source.function,
    )
    return FunctionType(code, {})


def name_of(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return type(owner).__name__
    name = str(getattr(function, "__name__", function))
    is_of_attribute = name in ("__get__", "__set__")
    return f"{getattr(owner, '__name__', owner)}.{name}" if is_of_attribute else name


def is_in_place(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def lose(tensors: Iterable[Tensor], error: BaseException) -> None:
    """Have every use of tensors that were never filled raise an error with this one's text."""

    def refuse(cls: type, *details: Any) -> NoReturn:
        raise CaptureError(
            "a tensor of an iteration that came to no end is used, and was never computed: "
            f"{first_line(error)}",
            source=user_source_line(),
        ) from error

    for tensor in tensors:
        kind = type(tensor)
        refusing: dict[str, Any] = {"__torch_function__": classmethod(refuse)}
        if is_wrapper_subclass(kind):  # whose own methods may be no functions of torch
            refusing["__torch_dispatch__"] = classmethod(refuse)
        tensor.__class__ = type("Lost", (kind,), refusing)


def refusal(
    why: str,
    remedy: str,
    kind: HazardKind = HazardKind.STATE,
    source: SourceLine | None = None,
) -> CaptureError:
    return CaptureError(f"{why}. Remedy: {remedy}", source=source or user_source_line(), kind=kind)


def of_written(tensor: Tensor, by: str = "") -> CaptureError:
    return refusal(
        f"a tensor of shape {tuple(tensor.shape)} from outside of the iteration was written "
        f"{by and f'by {by} '}between the model's call and the optimizer's step",
        f"make a new tensor there, or {LATER}",
    )


def of_unseen(name: str) -> CaptureError:
    return refusal(
        f"{name} is given a tensor that is not there before the optimizer's step, and that no call "
        "in the loop has returned: a module has kept it, or it was made by something that torch "
        "does not tell of (functorch, TorchScript, set_)",
        "return it from the forward of a module that capture_in_place is given, do such work in "
        f"one, or {LATER}",
    )


def calls_first(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether ``step(closure)`` is known to be ``closure()`` and then ``step()``."""
    return type(optimizer).__module__.startswith(("torch.optim.", "graphfsdp.optim."))


def trains_through(args: Any, kwargs: Any) -> bool:
    """Tell whether a call is given what another model has computed, to train that."""
    leaves = tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ()
    return any(isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in leaves)
