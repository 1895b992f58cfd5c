"""What operators do with tensors whose rows are cut, by name, tag and schema."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphfsdp.base.torch_internals import OpOverload, schema_of
from graphfsdp.errors import ConfigError

_alias = torch.ops.aten.alias.default

# Beside those that torch tags as pointwise.
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")
_LOCAL = frozenset(
    (
        *(f"aten::{name}" for name in _LIKE),
        *("aten::detach", "aten::alias", "aten::lift_fresh", "aten::clone", "aten::copy_"),
        *("aten::_to_copy", "aten::copy", "aten::fill_", "aten::zero_", "aten::contiguous"),
        *("aten::fill", "aten::zero", "aten::detach_", "aten::record_stream", "aten::lerp_"),
    )
)
RANDOM = frozenset(
    f"aten::{name}"
    for name in (
        *("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_"),
        *("bernoulli", "native_dropout", "exponential_", "geometric_", "log_normal_"),
        *("cauchy_", "random_"),
    )
)
NEW = frozenset(
    f"aten::{name}"
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
)
SUMS = frozenset(("aten::sum", "aten::linalg_vector_norm"))


@functools.cache
def is_local(func: OpOverload) -> bool:
    """Tell whether an operator works element by element, on tensors or on lists of them."""
    name = schema_of(func).name
    if any("Tensor" not in str(result.type) for result in schema_of(func).returns):
        return False  # torch.equal, which torch tags as pointwise
    if torch.Tag.pointwise in func.tags or name in _LOCAL:
        return True
    if name.startswith("aten::_foreach_"):
        return not any(word in name for word in ("_norm", "_max.", "_sum")) and (
            name not in ("aten::_foreach_max", "aten::_foreach_powsum")
        )
    return name.startswith("aten::_fused_ada") or name.startswith("aten::_fused_sgd")


@functools.cache
def is_view(func: OpOverload) -> bool:
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema_of(func).returns
    )


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, item) for item in value)
    return value


def call_with(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    change: Callable[[Tensor], Any],
) -> Any:
    return func(
        *map_tensors(change, args), **{name: map_tensors(change, v) for name, v in kwargs.items()}
    )


def resolved(size: Sequence[int], numel: int) -> tuple[int, ...]:
    if -1 not in size:
        return tuple(size)
    known = math.prod(length for length in size if length != -1)
    return tuple(numel // known if length == -1 else length for length in size) if known else ()


def view_of_rows(
    func: OpOverload,
    local: Tensor,  # [rows here, ...]
    shape: tuple[int, ...],  # of the whole
    place: tuple[tuple[int, ...], Any],  # its strides and storage offset
    args: tuple[Any, ...],
) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return the view that an operator makes of the rows here, and the shape of the whole one.

    None where some row would be somewhere else, or none.
    """
    if not shape:
        return None
    dims = len(shape)
    name = schema_of(func).name.removeprefix("aten::")
    if name == "as_strided":
        same = tuple(args[0]) == shape and tuple(args[1]) == place[0]
        here = len(args) < 3 or args[2] in (None, place[1])
        return (_alias(local), shape) if same and here else None
    if name in ("view", "_unsafe_view"):
        numel = math.prod(shape)
        size = resolved(args[0], numel)
        if not size or size[0] != shape[0] or not numel:
            return None
        return func(local, [local.shape[0], *size[1:]]), size
    if name == "slice":
        given: tuple[Any, ...] = tuple(args[1:])
        start, end, step = given + (None, None, 1)[len(given) :]
        if args[:1] in ((), (0,), (-dims,)):
            everything = start in (None, 0) and (end is None or end >= shape[0]) and step == 1
            return (_alias(local), shape) if everything else None
    keeps_rows = {
        "slice": lambda: args[0] % dims > 0,
        "select": lambda: args[0] % dims > 0,
        "transpose": lambda: args[0] % dims > 0 and args[1] % dims > 0,
        "unsqueeze": lambda: args[0] % (dims + 1) > 0,
        "permute": lambda: args[0][0] % dims == 0,
    }.get(name)
    if keeps_rows is None or not keeps_rows():
        return None
    view = func(local, *args)
    return view, (shape[0], *view.shape[1:])


def refuse_plain(func: OpOverload, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that may be whole, or somebody's rows; as torch's DTensor does."""
    for tensor in tensors:
        if not isinstance(tensor, DTensor) and tensor.dim() and tensor.numel() != 1:
            raise ConfigError(
                f"{func} got a sharded parameter (a DTensor) and a plain tensor of shape "
                f"{tuple(tensor.shape)}: nobody can tell whether that is whole. Remedy: "
                "DTensor.from_local(tensor, param.device_mesh, [Replicate()] * "
                "param.device_mesh.ndim) if each rank holds all of it, or param.to_local() and "
                "the rows of this rank"
            )


def refuse_whole(func: OpOverload) -> None:
    if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
        reason = "is a collective, and the ranks hold different rows. Remedy: param.to_local(), or "
        reason += "param.full_tensor()"
    elif torch.Tag.inplace_view in func.tags:
        reason = "changes the shape of a sharded parameter in place. Remedy: a new tensor"
    elif torch.Tag.nondeterministic_seeded in func.tags:
        reason = "draws random numbers, which every rank would draw for itself. Remedy: draw from "
        reason += "param.full_tensor() on one rank, and broadcast"
    else:
        return
    raise ConfigError(f"{func} {reason}")
