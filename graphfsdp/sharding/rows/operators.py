"""What operators do on tensors whose rows are cut; which are refused.

An operator that works element by element runs on the rows of each rank, where all operands have the
same rows or are whole; the result has these rows again. Sums and norms are added up over ranks;
means, extremes and variances are computed from the whole tensor, which is gathered for that. All
other operators are refused, by name, and on all ranks alike: by what they all know, never by how
many rows happen to be here.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphfsdp.base.op_tensors import OpCall, flat_tensors
from graphfsdp.base.torch_internals import (
    OpOverload,
    local_tensor_of,
    schema_of,
    spec_of,
    tree_map_only,
)
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.placement import (
    CommonRows,
    RowShard,
    common_rows,
    is_cut,
    my_rows,
    row_axis,
    whole_of,
    wrap_rows,
)

_aten = torch.ops.aten

# Beside those that torch tags as pointwise.
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")
_LOCAL = frozenset(
    (
        *(f"aten::{name}" for name in _LIKE),
        *("aten::detach", "aten::alias", "aten::lift_fresh", "aten::clone", "aten::copy_"),
        *("aten::_to_copy", "aten::copy", "aten::fill_", "aten::zero_", "aten::contiguous"),
        *("aten::fill", "aten::zero", "aten::detach_", "aten::record_stream", "aten::lerp_"),
        *("aten::masked_fill", "aten::masked_fill_"),
    )
)
_RANDOM = frozenset(
    f"aten::{name}"
    for name in (
        *("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_"),
        *("bernoulli", "native_dropout", "exponential_", "geometric_", "log_normal_"),
        *("cauchy_", "random_"),
    )
)


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator some of whose operands may be cut by rows; ConfigError: it is refused.

    Capture: the same operator on this rank's rows; reductions and an all-reduce or two.
    """
    tensors = flat_tensors([*args, *kwargs.values()])
    if not any(is_cut(tensor) for tensor in tensors):
        return func(*args, **kwargs)
    name = schema_of(func).name
    if _is_local(func):
        return _run_on_rows(func, args, kwargs)
    if name in _RANDOM or name.startswith("aten::_amp_foreach_non_finite"):
        return _run_as_torch(func, args, kwargs)
    if name == "aten::_foreach_norm":
        return [_norm_of(tensor, *args[1:], **kwargs) for tensor in args[0]]
    if name == "aten::index_put_" and _is_masked_fill(*args):
        return _run_on_rows(_aten.masked_fill_.Tensor, (args[0], *args[1], args[2]), {})
    if name in _REDUCTIONS and not schema_of(func).is_mutable:
        named = dict(zip((each.name for each in schema_of(func).arguments), args, strict=False))
        named |= kwargs
        if is_cut(named.get("self")) and _adds_up(name, named["self"], named):
            return _for_all(_add_up(func, named.pop("self"), named))
        return _of_whole(func, args, kwargs)
    raise _refusal(func)


def _refusal(func: OpOverload, why: str = "") -> ConfigError:
    return ConfigError(
        f"{func} is not done on a sharded parameter, whose rows lie on several ranks{why}. What is "
        "done there is what works element by element on the same rows, equal, any, all, sum, mean, "
        "norm, min, max, var and std. Remedy: on all ranks param.full_tensor(), which is whole, "
        "and the operator on that"
    )


@functools.cache
def _is_local(func: OpOverload) -> bool:
    """Tell whether an operator works element by element, on tensors or on lists of them."""
    name = schema_of(func).name
    if (torch.Tag.pointwise in func.tags and name not in _REDUCTIONS) or name in _LOCAL:
        return True
    if name.startswith("aten::_foreach_"):
        return not any(word in name for word in ("_norm", "_max.", "_sum")) and (
            name not in ("aten::_foreach_max", "aten::_foreach_powsum")
        )
    return name.startswith("aten::_fused_ada") or name.startswith("aten::_fused_sgd")


def _is_masked_fill(
    tensor: Tensor, indices: Sequence[Any], value: Tensor, *accumulate: bool
) -> bool:
    """Tell whether values are set to a number where a mask is true: ``tensor[mask] = number``."""
    mask = indices[0] if len(indices) == 1 else None
    fits = mask is not None and mask.dtype is torch.bool and mask.shape == tensor.shape
    return fits and not value.dim() and not any(accumulate)


# Rows of each rank


def _run_on_rows(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [*args, *kwargs.values()]
    lists = [v for v in values if isinstance(v, list | tuple) and v and isinstance(v[0], Tensor)]
    single = [value for value in values if isinstance(value, Tensor)]
    if lists and any(tensor.dim() for tensor in single):
        raise _refusal(func, " and which are in lists beside a tensor that is in none")
    if lists:
        count = max(len(items) for items in lists)
        calls = [[*single, *(items[i] for items in lists if items)] for i in range(count)]
    else:
        calls = [single]
    written = {id(tensor) for tensor in OpCall(func, args, kwargs).written}
    for call in calls:  # lists may hold plain tensors as well, which have theirs beside them
        if any(isinstance(tensor, DTensor) for tensor in call):
            _refuse_plain(func, call)
    places = [common_rows(call, written) for call in calls]
    if None in places:
        raise _refusal(func, ", with operands that have other rows")
    originals: dict[int, Tensor] = {}

    def local(tensor: Tensor, place: Any) -> Tensor:
        found = _local(tensor, place)
        originals[id(found)] = tensor
        return found

    def localize(value: Any) -> Any:
        if isinstance(value, Tensor):
            return local(value, places[0])
        if any(value is items for items in lists):
            pairs = zip(value, places, strict=True)
            return type(value)(local(tensor, place) for tensor, place in pairs)
        return value

    # Kept until the results are known, so that no identity is taken twice.
    new_args = [localize(value) for value in args]
    new_kwargs = {name: localize(value) for name, value in kwargs.items()}
    result = func(*new_args, **new_kwargs)

    def wrap(value: Tensor, place: Any) -> Tensor:
        if id(value) in originals:
            return originals[id(value)]
        spec = place.spec
        if spec is None:
            return value
        return wrap_rows(place.rows_as, value, spec.mesh, spec.placements, place.shape)

    if lists and isinstance(result, list | tuple):
        return type(result)(wrap(value, place) for value, place in zip(result, places, strict=True))
    return tree_map_only(Tensor, lambda value: wrap(value, places[0]), result)


def _refuse_plain(func: OpOverload, tensors: Sequence[Tensor]) -> None:
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


def _local(tensor: Any, place: CommonRows) -> Tensor:
    """Return what this rank needs of an operand; torch makes whole what it has cut itself."""
    if not isinstance(tensor, DTensor):
        return tensor  # type: ignore[no-any-return]
    spec = place.spec
    assert spec is not None
    if is_cut(tensor) or row_axis(spec.placements) is None:
        return local_tensor_of(tensor)
    kept = (Replicate(),) * spec.mesh.ndim
    if tensor.placements != kept:
        tensor = tensor.redistribute(spec.mesh, kept)
    whole: Tensor = local_tensor_of(tensor)
    if whole.dim() and whole.dim() == len(place.shape) and whole.shape[0] == place.shape[0]:
        return my_rows(whole, spec.mesh, spec.placements)
    return whole


# Random numbers, sums and norms, which torch knows how to draw and to add up over a mesh


def _stand_in(tensor: Any) -> Any:
    """Return the same rows as if torch had cut them.

    Only for operators that neither look at how many rows there are nor move any.
    """
    places = tuple(Shard(0) if isinstance(p, RowShard) else p for p in tensor.placements)
    mesh, dtype = tensor.device_mesh, tensor.dtype
    spec = spec_of(mesh, places, tensor.shape, tensor.stride(), dtype)
    return DTensor(local_tensor_of(tensor), spec, requires_grad=False)


def _as_rows(value: Any, like: DTensor) -> Any:
    """Return what torch has made of a stand-in, with the placement of our rows again."""
    axis = row_axis(like.placements)
    assert axis is not None
    if not value.placements[axis].is_shard():
        return value
    places = tuple(
        like.placements[axis] if at == axis else place for at, place in enumerate(value.placements)
    )
    return wrap_rows(
        type(like), local_tensor_of(value), value.device_mesh, places, tuple(value.shape)
    )


def _run_as_torch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let torch fill or draw the rows of each rank: it knows how random numbers differ there."""
    cut: list[Any] = [t for t in flat_tensors([*args, *kwargs.values()]) if is_cut(t)]
    made = {id(tensor): _stand_in(tensor) for tensor in cut}

    def change(tensor: Tensor) -> Any:
        return made.get(id(tensor), tensor)

    args, kwargs = tree_map_only(Tensor, change, (args, kwargs))
    result = func(*args, **kwargs)
    back = {id(made[id(tensor)]): tensor for tensor in cut}
    return tree_map_only(
        Tensor,
        lambda value: back[id(value)] if id(value) in back else _as_rows(value, cut[0]),
        result,
    )


_Named = Mapping[str, Any]  # arguments but for the tensor, by name


def _of_whole(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather all rows, and have each rank compute on the whole."""
    tensors = flat_tensors([*args, *kwargs.values()])
    _refuse_plain(func, tensors)
    cut: Any = next(filter(is_cut, tensors))
    mesh = cut.device_mesh
    everywhere = (Replicate(),) * mesh.ndim

    def whole(tensor: DTensor) -> Tensor:
        rows = whole_of(tensor) if is_cut(tensor) else tensor
        return local_tensor_of(rows.redistribute(mesh, everywhere))

    args, kwargs = tree_map_only(DTensor, whole, (args, kwargs))
    return tree_map_only(
        Tensor,
        lambda value: wrap_rows(DTensor, value, mesh, everywhere, tuple(value.shape)),
        func(*args, **kwargs),
    )


def _for_all(result: Any) -> Any:
    """Add up what torch has not: it would add a number to the part of every rank."""
    if is_cut(result):
        return result
    places = [Replicate() if place.is_partial() else place for place in result.placements]
    return result.redistribute(result.device_mesh, places)


def _add_up(func: OpOverload, rows: DTensor, named: _Named) -> Any:
    """Return a sum or norm over the rows of all ranks; torch adds it up when it is asked for it."""
    return _as_rows(func(_stand_in(rows), **named), rows)


def _adds_up(name: str, rows: DTensor, named: _Named) -> bool:
    """Tell whether it is less to exchange what ranks have found for their rows."""
    if not rows.dim() or name not in ("aten::sum", "aten::linalg_vector_norm"):
        return False
    dims = named.get("dim") or range(rows.dim())
    over_all = len(dims) == rows.dim() or 0 not in [dim % rows.dim() for dim in dims]
    return name == "aten::sum" or (over_all and 0 < named.get("ord", 2) < math.inf)


def _norm_of(tensor: Any, order: float = 2, dtype: torch.dtype | None = None) -> Any:
    """Return one of a list of norms, which clipping joins first: one exchange for all of them."""
    func = _aten.linalg_vector_norm.default
    named = {"ord": order, "dtype": dtype}
    if is_cut(tensor) and _adds_up("aten::linalg_vector_norm", tensor, named):
        return _add_up(func, tensor, named)
    return run(func, (tensor,), named)


# Done on the whole, where it is not less to add up.
_REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in (
        *("equal", "any", "all", "sum", "mean", "var", "std", "linalg_vector_norm"),
        *("max", "min", "amax", "amin"),
    )
)
