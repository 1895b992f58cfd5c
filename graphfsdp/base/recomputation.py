"""Activation recomputation that draws nothing twice, so that a graph can hold it."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar, cast

import torch
from torch import Tensor

from graphfsdp.base.op_tensors import (
    RUNNING_STATISTICS,
    SILENT_WRITERS,
    OpCall,
    OperatorMode,
    storage_key,
)
from graphfsdp.base.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    schema_of,
    tree_map_only,
)
from graphfsdp.errors import GraphFSDPError

P = ParamSpec("P")
R = TypeVar("R")

# What they draw is kept in a byte each.
_ZERO_OR_ONE = ("aten::bernoulli", "aten::bernoulli_")


def recompute(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function now, and again in the backward pass instead of keeping what it computed.

    Like ``torch.utils.checkpoint.checkpoint``, but the second call draws no random numbers: what
    the first one drew is kept. So nothing needs the state of a generator, which a graph cannot
    read or set, and results and gradients equal those without recomputation bit for bit. What the
    function does to other people's tensors (BatchNorm's running statistics, a counter) happens
    in the first call only.

    Kept are the results of random operators: of a dropout on a CPU its mask, a byte per element,
    and of CUDA's fused dropout its mask and its output.

    Args:
        function: A module or function of tensors. It must compute the same each time.
        *args: Its arguments.
        **kwargs: Likewise.

    Returns:
        What it returns.

    Raises:
        GraphFSDPError: in the backward pass: the second call drew other random numbers than the
            first.

    Capture: no host sync, no generator state. The second call is recorded where it runs, in the
        backward pass.
    Source: Chen et al. 2016 (arXiv:1604.06174) for recomputation.
    """
    from torch.utils.checkpoint import checkpoint

    call = cast("Callable[..., R]", checkpoint)
    options = {"preserve_rng_state": False, "context_fn": recompute_contexts}
    return call(function, *args, use_reentrant=False, **options, **kwargs)


def recompute_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of the first and of the later calls, for code that calls torch's own.

    Pass it where a library calls ``torch.utils.checkpoint.checkpoint``, as Hugging Face does::

        model.activation_checkpointing_enable(  # gradient_checkpointing_enable before version 5
            {
                "use_reentrant": False,
                "preserve_rng_state": False,
                "context_fn": graphfsdp.recompute_contexts,
            }
        )

    Capture: see ``recompute``.
    """
    drawn: list[_Drawn] = []
    return _Keep(drawn), _Repeat(drawn)


def _writing_twice() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    drawn: list[_Drawn] = []
    return _Keep(drawn), _Repeat(drawn, leaves_alone=False)


# What torch's checkpoint without reentrance runs around the function, by version.
_AROUND = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)


@contextmanager
def torchs_checkpoints_as_ours() -> Iterator[None]:
    """Have ``torch.utils.checkpoint`` keep what was drawn while the body runs.

    As it is written by default, it stores the state of the generators in the forward pass and sets
    it in the backward pass, which no graph can. ``recompute`` draws nothing twice, and comes to the
    same bits: what the function writes (running statistics) it writes in both calls here, as with
    torch's. Left alone is who has said otherwise (``preserve_rng_state=False``, ``context_fn``).
    """
    module = sys.modules.get("torch.utils.checkpoint")
    if module is None:
        yield
        return
    names = [name for name in (*_AROUND, "CheckpointFunction") if hasattr(module, name)]
    before = {name: vars(module)[name] for name in names}
    plain = vars(module)["noop_context_fn"]
    for name in names:
        is_reentrant = name == "CheckpointFunction"
        vars(module)[name] = (
            _Reentrant(before[name]) if is_reentrant else _keeping(before[name], plain)
        )
    try:
        yield
    finally:
        vars(module).update(before)


def _keeping(around: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(around)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "preserve_rng_state" in kwargs:  # torch 2.15
            if kwargs["preserve_rng_state"] and kwargs["context_fn"] is plain:
                kwargs |= {"preserve_rng_state": False, "context_fn": _writing_twice}
        elif len(args) > 2 and args[1] and args[2] is plain:
            args = (args[0], False, _writing_twice, *args[3:])
        return around(*args, **kwargs)

    return call


class _Reentrant:
    """Takes the place of torch's autograd function of reentrant checkpoints."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def apply(self, function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        # Torch's own, since its inner backward pass adds up apart from the one around it.
        first, later = _writing_twice()
        contexts = iter((first,))

        def call(*args: Any) -> Any:
            with next(contexts, later):
                return function(*args)

        return self._function.apply(call if preserves else function, False, *args)


class _Drawn(NamedTuple):
    """Copies of what one random operator returned, and wrote to its arguments: others write on."""

    op: OpOverload
    written: list[Tensor]
    result: Any  # None if that is what it has written


class _Keep(OperatorMode):
    """The first call: keeps what random operators draw."""

    recomputes = True

    def __init__(self, drawn: list[_Drawn]) -> None:
        super().__init__()
        self._drawn = drawn

    def on_op(self, call: OpCall) -> Any:
        result = call.run()
        if call.is_random:
            dtype = torch.bool if call.schema_name in _ZERO_OR_ONE else None
            new = None if _returns_what_it_writes(call.op) else result
            self._drawn.append(_Drawn(call.op, *_copied([call.written, new], dtype)))
        return result


def _copied(values: Any, dtype: torch.dtype | None) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(dtype or each.dtype, copy=True), values)


class _Repeat(OperatorMode):
    """A later call: draws nothing, and ``leaves_alone`` the tensors that were there before."""

    recomputes = True

    def __init__(self, drawn: list[_Drawn], *, leaves_alone: bool = True) -> None:
        super().__init__()
        self._drawn = drawn
        self._leaves_alone = leaves_alone
        self._next = 0
        self._own: set[int] = set()  # storages that this call has made

    def __enter__(self) -> Self:
        self._next = 0
        self._own.clear()
        super().__enter__()
        return self

    def on_op(self, call: OpCall) -> Any:
        op, args, written = call.op, call.args, call.written
        if call.is_random:
            result = self._repeat(self._next_drawn(op), call)
        elif written and not any(self._is_own(tensor) for tensor in written) and _only_writes(op):
            result = _arguments_of(call)
        else:
            if self._leaves_alone and schema_of(op).name in SILENT_WRITERS:
                stats = [None if s is None else s.clone() for s in args[RUNNING_STATISTICS]]
                before, behind = RUNNING_STATISTICS.start, RUNNING_STATISTICS.stop
                args = (*args[:before], *stats, *args[behind:])
            result = op(*args, **call.kwargs)
        self._own.update(key for _, key in call.made(result))
        return result

    def _repeat(self, drawn: _Drawn, call: OpCall) -> Any:
        """Return what the operator returned, and write what it wrote into tensors of this call."""
        for kept, tensor in zip(drawn.written, call.written, strict=True):
            if self._is_own(tensor):
                tensor.copy_(kept)
        if _returns_what_it_writes(call.op):
            return _arguments_of(call)
        is_packed = call.schema_name in _ZERO_OR_ONE
        return _copied(drawn.result, call.tensors[0].dtype if is_packed else None)

    def _is_own(self, tensor: Tensor) -> bool:
        return not self._leaves_alone or storage_key(tensor) in self._own

    def _next_drawn(self, op: OpOverload) -> _Drawn:
        drawn = self._drawn[self._next] if self._next < len(self._drawn) else None
        if drawn is None or drawn.op is not op:
            first = "nothing more" if drawn is None else f"with {drawn.op}"
            raise GraphFSDPError(
                f"the function given to graphfsdp.recompute drew {first} in its first call, and "
                f"draws with {op} as number {self._next + 1} in the backward pass. Remedy: it "
                "must do the same in every call"
            )
        self._next += 1
        return drawn


def _only_writes(op: OpOverload) -> bool:
    """Tell whether an operator changes values and returns nothing but what it was given."""
    if op.namespace != "aten" or torch.Tag.inplace_view in op.tags:
        return False
    return _returns_what_it_writes(op)


def _returns_what_it_writes(op: OpOverload) -> bool:
    returns = schema_of(op).returns
    return all(ret.alias_info is not None and ret.alias_info.is_write for ret in returns)


def _arguments_of(call: OpCall) -> Any:
    """Return the arguments that such a call would return."""
    by_alias = {_alias_name(argument): value for argument, value in call.given()}
    found = [by_alias[_alias_name(value)] for value in schema_of(call.op).returns]
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _alias_name(argument: torch.Argument) -> str | None:
    info = argument.alias_info
    return None if info is None else next(iter(info.before_set), None)
