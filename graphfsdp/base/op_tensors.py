"""Which tensors an operator call takes, reads and writes, and the mode that sees operator calls."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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

# What these return has no contents until somebody writes them.
_EMPTY_OPS = frozenset(
    (
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted"),
        *("aten::new_empty", "aten::new_empty_strided"),
    )
)


def is_empty(op: torch._ops.OpOverload) -> bool:
    """Tell whether an operator makes memory, and neither reads nor writes any."""
    return op._schema.name in _EMPTY_OPS


def draws_numbers(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Tell whether an operator call draws random numbers.

    Attention without dropout has the tag of attention with it.
    """
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            default = kwargs.get("dropout_p", argument.default_value)
            return bool((args[index] if index < len(args) else default) != 0.0)
    return "scaled_dot_product" not in op._schema.name


def is_wrapper_subclass(kind: type) -> bool:
    """Tell whether a tensor type handles operators itself (DTensor, async collectives)."""
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not None and handler is not torch._C._disabled_torch_dispatch_impl


def computes_nothing() -> bool:
    """Tell whether operators only find out shapes now (DTensor does that before it shards)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def flat_tensors(values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, lists opened."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(flat_tensors(value))
    return found


def written_arguments(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the arguments that an operator writes, by its schema or by what is known of it."""
    places, writes_statistics = _written_places(op)
    written = [args[index] if index < len(args) else kwargs.get(name) for index, name in places]
    if writes_statistics:
        written += args[RUNNING_STATISTICS]
    return written


@functools.cache  # asking a schema takes longer than many operators
def _written_places(op: torch._ops.OpOverload) -> tuple[list[tuple[int, str]], bool]:
    """Return index and name of what the schema says is written, and whether statistics are too."""
    places = [
        (index, argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return places, op._schema.name in SILENT_WRITERS


@functools.cache
def scratch_places(op: torch._ops.OpOverload) -> tuple[int, int] | None:
    """Return where an operator of ours takes memory without contents, and how much; or None."""
    if op.namespace != "graphfsdp":
        return None
    names = [argument.name for argument in op._schema.arguments]
    return (names.index("scratch"), names.index("scratch_bytes")) if "scratch" in names else None


def written_tensors(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    return flat_tensors(written_arguments(op, args, kwargs))


def may_write(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the tensors that an operator may write: of somebody else's operator, all."""
    if op.namespace in TRUSTED_NAMESPACES:
        return written_tensors(op, args, kwargs)
    return flat_tensors(args) + flat_tensors(kwargs.values())


def read_tensors(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the arguments whose contents an operator reads, and does not just look at anew."""
    read: list[Tensor] = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            read.extend(flat_tensors([value]))
    return read


class OperatorMode(TorchDispatchMode):
    """Shows operators to whoever derives from it, wrapper tensors being taken apart first."""

    # So that torch.cond and its like arrive here, and are refused by name where their turn comes.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if computes_nothing():
            return func(*args, **kwargs)
        if any(is_wrapper_subclass(kind) for kind in types):
            return NotImplemented  # it desugars itself; its inner operators come back here
        if isinstance(func, torch._ops.OpOverload):
            return self.on_op(func, args, kwargs)
        return self.on_higher_order(func, args, kwargs)

    def on_op(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return op(*args, **kwargs)

    def on_higher_order(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return func(*args, **kwargs)
