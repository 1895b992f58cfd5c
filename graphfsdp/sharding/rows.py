"""What ``model.parameters()`` shows of a sharded unit: DTensors whose rows are cut unevenly.

torch's DTensor takes for granted that ``torch.chunk`` has cut a tensor. So nothing here is asked of
it for a tensor that is cut otherwise: operators on those are done here, or refused.

An operator that works element by element runs on the rows of each rank, where all operands have the
same rows or are whole; the result has these rows again. Sums and norms are added up over ranks;
means, extremes and variances are computed from the whole tensor, which is gathered for that. All
other operators are refused, by name, and on all ranks alike: by what they all know, never by how
many rows happen to be here.

Note [Who asks a RowTensor]: from 2.13 on torch leaves operators to children of its DTensor. Before,
it runs them itself, as if ``torch.chunk`` had cut the rows. So there each function of torch's that
is called with a RowTensor runs inside of a mode, which is asked first. A backward pass is out of
its reach: gradients of what functions make of a RowTensor are refused there, but for those of
``full_tensor``, ``to_local`` and ``redistribute``.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optim_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_types

from graphfsdp.base.memory import contiguous_stride
from graphfsdp.base.op_tensors import OpCall, flat_tensors
from graphfsdp.base.torch_internals import (
    ASKS_SUBCLASSES,
    OpOverload,
    TorchDispatchMode,
    known_spec,
    local_tensor_of,
    schema_of,
    spec_of,
    tree_map_only,
)
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.mesh import RowShard

# On a tensor: the hook that keeps its gradient cut by rows.
_KEEPS_ROWS = "_graphfsdp_keeps_rows"


class RowTensor(DTensor):
    """A DTensor whose rows are cut as a ``RowShard`` says, evenly or not."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return run(func, tuple(args), dict(kwargs or {}))

    def data_ptr(self) -> int:
        """Return 0: by this torch tells that there is no storage to be copied or saved.

        It adds the storage offset of the part, where torch.compile expects that.
        """
        return 0

    if not ASKS_SUBCLASSES:

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Any,
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            # With functions of children off, as for torch's DTensors.
            call = functools.partial(super().__torch_function__, func, types, args, kwargs or {})
            if _only_asks(func):
                return call()
            with _RowsFirst():  # type: ignore[no-untyped-call]
                result = call()
            for tensor in flat_tensors([result]):
                if tensor.grad_fn is not None:
                    tensor.register_hook(functools.partial(_refuse_gradient, func))
            return result

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> "RowTensor":
        made: Any = DTensor.__tensor_unflatten__(
            inner_tensors, flatten_spec, outer_size, outer_stride
        )
        kind: Any = RowTensor
        found: RowTensor = kind(
            local_tensor_of(made), known_spec(made), requires_grad=made.requires_grad
        )
        return found

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Do as torch does for its own placements, from the whole tensor if rows move."""
        mesh = device_mesh or self.device_mesh
        if placements is not None and tuple(placements) == self.placements:
            return self
        _keep_rows(self)
        whole: DTensor = _Gather.apply(self)  # type: ignore[no-untyped-call]
        if placements is not None and tuple(placements) == whole.placements:
            return whole
        return whole.redistribute(mesh, placements, **options)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's rows; a gradient comes back as rows of the same tensor."""
        if grad_placements is None and self.requires_grad and torch.is_grad_enabled():
            _keep_rows(self)
            local: Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
            return local
        found: Tensor = super().to_local(grad_placements=grad_placements)
        return found


class _RowsFirst(TorchDispatchMode):
    """Asks us for operators on a RowTensor; see Note [Who asks a RowTensor]."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return run(func, tuple(args), dict(kwargs or {}))


def _only_asks(func: Callable[..., Any]) -> bool:
    """Tell whether a function gets or sets an attribute, and runs no operator."""
    if func.__name__ not in ("__get__", "__set__"):
        return False
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return attribute not in ("data", "T", "H", "mT", "mH", "real", "imag")


def _refuse_gradient(func: Callable[..., Any], grad: Tensor) -> NoReturn:
    raise ConfigError(
        f"a gradient has reached the sharded parameter that {func.__name__} was called with, past "
        f"any unit, and torch {torch.__version__} has no gradients of such operators. Remedy: "
        "weight_decay for an L2 penalty, or a penalty that the module computes of its weight in "
        "its own forward; for a tensor of your own the function on its full_tensor(), which has "
        "gradients, or torch 2.13 and newer"
    )


def _keep_rows(rows: Any) -> None:
    """See to it that gradients of several uses, which torch adds up by itself, are cut as rows."""
    watched = rows._post_accumulate_grad_hooks  # a unit's parameter, where a gradient is an error
    if ASKS_SUBCLASSES or watched or hasattr(rows, _KEEPS_ROWS):
        return
    if torch.is_grad_enabled() and rows.requires_grad and rows.is_leaf:
        place = rows.device_mesh, rows.placements, rows.shape
        setattr(rows, _KEEPS_ROWS, rows.register_hook(functools.partial(_as_rows_again, place)))


def _as_rows_again(place: tuple[Any, ...], grad: Tensor) -> Tensor:
    mesh, placements, shape = place
    return make_dtensor(local_tensor_of(grad), mesh, placements, shape)


# As torch does it for its own class, so that optimizers and clipping take lists at once.
for _types in (_optim_types, _util_types):
    if RowTensor not in _types:
        _types.append(RowTensor)
# torch.load takes weights_only=True by default.
torch.serialization.add_safe_globals([RowTensor])


def make_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return the DTensor of that shape whose part here is ``local``, a view."""
    return wrap_rows(local.detach(), mesh, tuple(placements), tuple(shape))


class _Gather(Function):
    """From rows to the whole tensor, and back."""

    @staticmethod
    def forward(ctx: Any, rows: DTensor) -> DTensor:
        ctx.mesh, ctx.placements = rows.device_mesh, rows.placements
        return whole_of(rows)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        kept = without_rows(ctx.placements)
        if grad.placements != kept:
            grad = grad.redistribute(ctx.mesh, kept)
        local = my_rows(local_tensor_of(grad), ctx.mesh, ctx.placements).clone()
        return make_dtensor(local, ctx.mesh, ctx.placements, grad.shape)


class _ToLocal(Function):
    @staticmethod
    def forward(ctx: Any, rows: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = rows.device_mesh, rows.placements, rows.shape
        local = local_tensor_of(rows)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return make_dtensor(grad, ctx.mesh, ctx.placements, ctx.shape)


# Parts and wholes


def row_axis(placements: Sequence[Placement]) -> int | None:
    for axis, place in enumerate(placements):
        if isinstance(place, RowShard):
            return axis
    return None


def is_cut(value: Any) -> bool:
    return isinstance(value, DTensor) and row_axis(value.placements) is not None


def global_stride(local: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of the whole, without gaps, in the order in which the part lies."""
    if local.dim() != len(shape) or local.is_contiguous():
        return contiguous_stride(shape)
    stride = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def without_rows(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if isinstance(place, RowShard) else place for place in placements)


def my_rows(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    axis = row_axis(placements)
    assert axis is not None
    place: Any = placements[axis]
    rows = whole if whole.dim() else whole.view(1)
    return rows.narrow(0, *place.rows_of(mesh.get_local_rank(axis)))


def wrap_rows(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> DTensor:
    kind: Any = DTensor if row_axis(placements) is None else RowTensor
    spec = spec_of(mesh, placements, shape, global_stride(local, shape), local.dtype)
    # torch would take the storage offset of the part, and then look for a storage that it copies.
    at_start = local.new_empty(0) if local.storage_offset() and kind is DTensor else local
    made: DTensor = kind(at_start, spec, requires_grad=False)
    made._local_tensor = local
    return made


def whole_of(rows: DTensor) -> DTensor:
    """Return a tensor that is cut over no axis of ours; one exchange of rows."""
    mesh, axis = rows.device_mesh, row_axis(rows.placements)
    assert axis is not None
    place: Any = rows.placements[axis]
    whole = place._to_replicate_tensor(local_tensor_of(rows), mesh, axis, rows.shape)
    if not rows.dim():
        whole = whole.view(())
    return wrap_rows(whole, mesh, without_rows(rows.placements), tuple(rows.shape))


class CommonRows(NamedTuple):
    """How the operands of one call are cut, and what shape their result has."""

    spec: Any
    shape: tuple[int, ...]


def common_rows(operands: Sequence[Tensor], written: set[int]) -> CommonRows | None:
    """Return what operands that are broadcast have in common; None if they have other rows."""
    shape = tuple(torch.broadcast_shapes(*(tensor.shape for tensor in operands)))
    spread: list[Any] = [tensor for tensor in operands if isinstance(tensor, DTensor)]
    cut = [tensor for tensor in spread if is_cut(tensor)]
    if not spread:
        return CommonRows(None, shape)
    spec = known_spec((cut or sorted(spread, key=lambda tensor: -tensor.dim()))[0])
    if any(tensor.device_mesh != spec.mesh for tensor in spread):
        return None
    if not cut:
        alike = all(
            (tensor.placements == spec.placements and tensor.shape == shape)
            or (not tensor.dim() and all(place.is_replicate() for place in tensor.placements))
            for tensor in spread
        )
        partial = any(isinstance(place, Partial) for place in spec.placements)
        return CommonRows(spec, shape) if alike and not partial else None
    others = [tensor for tensor in spread if tensor.dim() and not is_cut(tensor)]
    fits = not any(id(tensor) in written for tensor in others) and all(
        tensor.placements == spec.placements
        and tensor.dim() == len(shape)
        and tensor.shape[:1] == shape[:1]
        for tensor in cut
    )
    if not all(isinstance(place, Replicate | RowShard) for place in spec.placements):
        fits = fits and not others and all(tensor.shape == shape for tensor in cut)
    return CommonRows(spec, shape) if fits else None


# Operators

_aten = torch.ops.aten

# Beside those that torch tags as pointwise.
_LOCAL = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "detach", "detach_", "alias"),
        *("lift_fresh", "clone", "copy", "copy_", "_to_copy", "fill", "fill_", "zero", "zero_"),
        *("contiguous", "record_stream", "lerp_", "masked_fill", "masked_fill_"),
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
    if name in ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum"):
        return False
    return name.startswith(("aten::_foreach_", "aten::_fused_ada", "aten::_fused_sgd"))


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
    count = max(map(len, lists), default=1)
    calls = [[*single, *(items[index] for items in lists)] for index in range(count)]
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
            return type(value)(map(local, value, places))
        return value

    # Kept until the results are known, so that no identity is taken twice.
    new_args = [localize(value) for value in args]
    new_kwargs = {name: localize(value) for name, value in kwargs.items()}
    result = func(*new_args, **new_kwargs)

    def wrap(value: Tensor, place: Any) -> Tensor:
        if id(value) in originals:
            return originals[id(value)]
        spec = place.spec
        return value if spec is None else wrap_rows(value, spec.mesh, spec.placements, place.shape)

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
    return wrap_rows(local_tensor_of(value), value.device_mesh, places, tuple(value.shape))


def _run_as_torch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let torch fill or draw the rows of each rank: it knows how random numbers differ there."""
    cut: list[Any] = [t for t in flat_tensors([*args, *kwargs.values()]) if is_cut(t)]
    made = {id(tensor): _stand_in(tensor) for tensor in cut}
    back = {id(made[id(tensor)]): tensor for tensor in cut}
    args, kwargs = tree_map_only(Tensor, lambda value: made.get(id(value), value), (args, kwargs))
    return tree_map_only(
        Tensor,
        lambda value: back[id(value)] if id(value) in back else _as_rows(value, cut[0]),
        func(*args, **kwargs),
    )


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

    def wrap(value: Tensor) -> Tensor:
        return wrap_rows(value, mesh, everywhere, tuple(value.shape))

    args, kwargs = tree_map_only(DTensor, whole, (args, kwargs))
    return tree_map_only(Tensor, wrap, func(*args, **kwargs))


def _for_all(result: Any) -> Any:
    """Add up what torch has not: it would add a number to the part of every rank."""
    if is_cut(result):
        return result
    places = [Replicate() if place.is_partial() else place for place in result.placements]
    return result.redistribute(result.device_mesh, places)


def _add_up(func: OpOverload, rows: DTensor, named: Mapping[str, Any]) -> Any:
    """Return a sum or norm over the rows of all ranks; torch adds it up when it is asked for it."""
    return _as_rows(func(_stand_in(rows), **named), rows)


def _adds_up(name: str, rows: DTensor, named: Mapping[str, Any]) -> bool:
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
