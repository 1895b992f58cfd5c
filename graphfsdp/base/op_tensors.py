"""Operator calls: which tensors they take, read and write, and the mode that sees them."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from graphfsdp.base.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    dispatch_mode_stack,
    key_of,
    num_dispatch_modes,
    schema_of,
)

# Operators that write arguments without saying so in their schema.
SILENT_WRITERS = (
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
)
RUNNING_STATISTICS = slice(3, 5)  # running_mean and running_var of each of them

# Operators of others may write what they do not declare.
TRUSTED_NAMESPACES = ("aten", "prims", "graphfsdp", "_c10d_functional", "profiler")

# Python hands these a tensor whose data it has just filled in, outside any operator.
LITERAL_OPS = ("aten::lift_fresh", "aten::lift")

_LISTS = (list, tuple)  # as a union it would be made anew in each call
# What these return has no contents until somebody writes them.
_EMPTY_OPS = frozenset(
    (
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted"),
        *("aten::new_empty", "aten::new_empty_strided"),
    )
)


def is_empty(op: OpOverload) -> bool:
    """Tell whether an operator makes memory, and neither reads nor writes any."""
    return schema_of(op).name in _EMPTY_OPS


def is_wrapper_subclass(kind: type) -> bool:
    """Tell whether a tensor type handles operators itself (DTensor, async collectives)."""
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not None and handler is not torch._C._disabled_torch_dispatch_impl


def computes_nothing() -> bool:
    """Tell whether operators only find out shapes now (DTensor does that before it shards)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def as_written() -> AbstractContextManager[object]:
    """Run what torch.compile has made as it was written, while the body runs.

    Under a dispatch mode torch gives up on a compiled function, for the rest of the process.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        return nullcontext()  # nothing is compiled; this import would take seconds
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def flat_tensors(values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, lists opened."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _LISTS):
            found.extend(flat_tensors(value))
    return found


def storage_key(tensor: Tensor) -> int:
    """Return what tells the storage under a tensor from others that live; 0 if it has none."""
    try:
        return int(key_of(tensor.untyped_storage()))
    except NotImplementedError:  # what torch raises for sparse and opaque layouts, and under vmap
        return 0


def in_same_memory(tensor: Tensor) -> Tensor:
    """Return another tensor in its memory, which is no view of it: both may get other memory."""
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    found.data = tensor
    return found


@functools.cache  # asking a schema takes longer than many operators
def _written_places(op: OpOverload) -> tuple[list[tuple[int, str]], bool]:
    """Return index and name of what the schema says is written, and whether statistics are too."""
    places = [
        (index, argument.name)
        for index, argument in enumerate(schema_of(op).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return places, schema_of(op).name in SILENT_WRITERS


@functools.cache  # asked for each call
def _facts_of(op: OpOverload) -> tuple[str, str, bool, bool, bool, bool]:
    """Return what all calls of an operator have in common: the first attributes of ``OpCall``."""
    schema_name, namespace = str(schema_of(op).name), op.namespace
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    is_trusted, is_ours = namespace in TRUSTED_NAMESPACES, namespace == "graphfsdp"
    return str(op), schema_name, is_random, is_trusted, is_ours, schema_name in LITERAL_OPS


class OpCall:
    """One call of an operator.

    What stands in for tensors in a program (values, stretches of memory) may stand in ``args`` and
    ``kwargs`` too; then only what says so looks at it.

    Attributes:
        name: Full name, such as ``aten.add.Tensor``.
        schema_name: Name without overload, such as ``aten::add``.
        is_random: Its operator may draw random numbers; see ``draws_numbers``.
        is_trusted: Its operator writes, and draws from, what it says and nothing else.
        is_ours: Its operator is one of this package.
        is_literal: It hands over data that Python has filled in (torch.tensor).
        around: What is entered while it runs, after all modes have seen it, if it has Python in it.
        sees_functions: Function modes then see what that calls.
    """

    def __init__(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        modes: Sequence["OperatorMode"] = (),
    ) -> None:
        """``modes`` see it before it runs, the last one first."""
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self._modes = [*modes]
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        self.sees_functions = False
        self.name, self.schema_name, self.is_random, *others = _facts_of(op)
        self.is_trusted, self.is_ours, self.is_literal = others
        self._result: Any = None
        self._results: list[tuple[Tensor, int]] = []

    def run(self) -> Any:
        """Run it, or have the next mode see it."""
        if self._modes:
            mode = self._modes.pop()
            try:
                return mode.on_op(self)
            finally:
                self._modes.append(mode)
        if self.is_trusted and not self.is_ours and not num_dispatch_modes():
            return self.op(*self.args, **self.kwargs)  # no Python is in there
        with self.around(), _functions_seen() if self.sees_functions else nullcontext():
            return self.op(*self.args, **self.kwargs)

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments, lists opened."""
        return flat_tensors([*self.args, *self.kwargs.values()])

    @functools.cached_property
    def keys(self) -> list[int]:
        """Of each of ``tensors`` the ``storage_key``, as it was when somebody asked first."""
        return list(map(storage_key, self.tensors))

    def results(self, result: Any) -> list[tuple[Tensor, int]]:
        """Return the tensors of what it has returned, lists opened, each with its storage's key.

        Every mode gets the same result, and asks.
        """
        if result is not self._result:
            self._results = [(tensor, storage_key(tensor)) for tensor in flat_tensors([result])]
            self._result = result
        return self._results

    def made(self, result: Any) -> list[tuple[Tensor, int]]:
        """Return those of its results that have a storage which no argument had."""
        return [each for each in self.results(result) if each[1] and each[1] not in self.keys]

    @functools.cached_property
    def written(self) -> list[Tensor]:
        """The tensors that it writes."""
        return flat_tensors(self.written_arguments())

    def written_arguments(self) -> list[Any]:
        """Return what stands where it writes, by its schema or by what is known of it."""
        places, writes_statistics = _written_places(self.op)
        args = self.args
        written = [args[i] if i < len(args) else self.kwargs.get(name) for i, name in places]
        if writes_statistics:
            written += args[RUNNING_STATISTICS]
        return written

    def may_write(self) -> list[Tensor]:
        """Return the tensors that it may write: of somebody else's operator, all."""
        return self.written if self.is_trusted else self.tensors

    def given(self) -> Iterator[tuple[torch.Argument, Any]]:
        """Yield each argument that it was given, as the schema has it, and its value."""
        for index, argument in enumerate(schema_of(self.op).arguments):
            if index < len(self.args):
                yield argument, self.args[index]
            elif argument.name in self.kwargs:
                yield argument, self.kwargs[argument.name]

    def read(self) -> list[Tensor]:
        """Return the arguments whose contents it reads, and does not just look at anew."""
        return flat_tensors(
            value for argument, value in self.given() if argument.alias_info is None
        )

    def draws_numbers(self) -> bool:
        """Tell whether it draws random numbers.

        Attention without dropout has the tag of attention with it.
        """
        if not self.is_random:
            return False
        for argument in schema_of(self.op).arguments:
            if argument.name == "dropout_p":
                given = {argument.name: value for argument, value in self.given()}
                return bool(given.get("dropout_p", argument.default_value) != 0.0)
        return "scaled_dot_product" not in self.schema_name


class OperatorMode(TorchDispatchMode):
    """Shows operators to whoever derives from it, wrapper tensors being taken apart first.

    Note [Our own Python]: a profile hook that is true to ``leaves_out_modes`` pauses in here. It
    would be called for each of our own calls, some hundred for an operator. It goes on where what
    is left to run has Python: operators of others, modes below, and our operators that use streams.
    Function modes are off likewise: autograd calls operators with them on.

    Note [Modes that join]: torch calls the modes of its stack one by one, which takes as long as
    what they do. So a mode that ``joins`` and is entered right inside of another such one stays
    away from torch's stack, and is called by that one.
    """

    # So that torch.cond and its like arrive here, and are refused by name where their turn comes.
    supports_higher_order_operators = True
    joins = False  # only what looks on: operators that it calls itself are seen by no joined mode

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._joined: list[OperatorMode] = []
        self._joins_in: list[OperatorMode] | None = None  # where it is, if not on torch's stack

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator two calls that keep torch.compile out: nothing compiles in here."""
        return False

    def __enter__(self) -> Self:
        outer = _get_current_dispatch_mode()
        if self._may_join(outer):
            self._joins_in = outer._joined
            self._joins_in.append(self)
        else:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        if self._joins_in is None:
            super().__exit__(*details)  # type: ignore[no-untyped-call]
        else:
            self._joins_in.remove(self)
            self._joins_in = None

    def _may_join(self, outer: object) -> TypeGuard["OperatorMode"]:
        if not (self.joins and isinstance(outer, OperatorMode) and outer.joins):
            return False
        # What compiles under the outer mode must not do so under this one if it keeps that out.
        return self.ignore_compile_internals() or not outer.ignore_compile_internals()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        profile: Any = sys.getprofile()  # which is told of every call until it pauses
        try:
            pauses = profile is not None and profile.__self__.leaves_out_modes
        except AttributeError:  # somebody else's
            pauses = False
        if pauses:
            sys.setprofile(None)
        try:
            sees_functions = torch._C._is_torch_function_enabled()
            with torch.DisableTorchFunction():
                if computes_nothing():
                    return func(*args, **kwargs)
                if any(is_wrapper_subclass(kind) for kind in types):
                    return NotImplemented  # it desugars itself; its inner operators come back here
                modes = (self, *self._joined)
                if isinstance(func, OpOverload):
                    call = OpCall(func, args, kwargs, modes)
                    call.sees_functions = sees_functions
                    if pauses:
                        call.around = functools.partial(_resumed, profile)
                    return call.run()
                for mode in reversed(modes):
                    mode.on_higher_order(func)
                return func(*args, **kwargs)
        finally:
            if pauses:
                sys.setprofile(profile)

    def on_op(self, call: OpCall) -> Any:
        return call.run()

    def on_higher_order(self, func: Callable[..., Any]) -> None: ...


_functions_seen: Callable[[], AbstractContextManager[object]] = torch._C._EnableTorchFunction


@contextmanager
def _resumed(profile: Any) -> Iterator[None]:
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def operator_modes() -> list[OperatorMode]:
    """Return the modes of this kind that operators meet now, the outermost first."""
    modes = dispatch_mode_stack()
    found = [(mode, *mode._joined) for mode in modes if isinstance(mode, OperatorMode)]
    return [mode for joined in found for mode in joined]
