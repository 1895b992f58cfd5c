"""What ``model.parameters()`` shows of a sharded unit: DTensors that handle operators themselves.

torch's DTensor takes for granted that ``torch.chunk`` has cut a tensor. So nothing here is asked of
it for a tensor that is cut otherwise. An operator runs

- on the rows of each rank, where it works element by element and all operands have the same rows;
  the result has these rows again;
- for sums and norms on the rows of each rank, whose results are added up;
- else on whole tensors, for which all ranks exchange their rows. The result is whole on every rank.
  What such an operator writes in place goes back into the rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optim_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_types

from graphfsdp.base.flat_buffer import contiguous_stride
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.placement import ASKS_SUBCLASSES, RowShard
from graphfsdp.sharding.row_operators import (
    NEW,
    RANDOM,
    SUMS,
    call_with,
    is_local,
    is_view,
    map_tensors,
    refuse_plain,
    refuse_whole,
    resolved,
    tensors_in,
    written_by,
)

_aten = torch.ops.aten

_UNFIT = object()  # no result: the operands do not have the same rows


class RowTensor(DTensor):
    """A DTensor whose rows are cut as a ``RowShard`` says, evenly or not."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _dispatch(func, tuple(args), dict(kwargs or {}))

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> "RowTensor":
        made: Any = DTensor.__tensor_unflatten__(
            inner_tensors, flatten_spec, outer_size, outer_stride
        )
        kind: Any = RowTensor
        found: RowTensor = kind(made._local_tensor, made._spec, requires_grad=made.requires_grad)
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
        whole: DTensor = _Gather.apply(self)  # type: ignore[no-untyped-call]
        if placements is not None and tuple(placements) == whole.placements:
            return whole
        return whole.redistribute(mesh, placements, **options)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's rows; a gradient comes back as rows of the same tensor."""
        if grad_placements is None and self.requires_grad and torch.is_grad_enabled():
            local: Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
            return local
        found: Tensor = super().to_local(grad_placements=grad_placements)
        return found


class WholeView(DTensor):
    """A view of a tensor that had to be made whole: what is written into it would be lost."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _dispatch(func, tuple(args), dict(kwargs or {}))


# As torch does it for its own class, so that optimizers and clipping take lists at once.
for _types in (_optim_types, _util_types):
    if RowTensor not in _types:
        _types.append(RowTensor)
# torch.load takes weights_only=True by default.
torch.serialization.add_safe_globals([RowTensor])


def row_axis(placements: Sequence[Placement]) -> int | None:
    """Return the mesh axis over which rows are cut, if any."""
    for axis, place in enumerate(placements):
        if isinstance(place, RowShard):
            return axis
    return None


def make_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return the DTensor of that shape whose part here is ``local``, a view."""
    made = _wrap(local.detach(), mesh, tuple(placements), tuple(shape))
    return made


class _Gather(Function):
    """From rows to the whole tensor, and back."""

    @staticmethod
    def forward(ctx: Any, rows: DTensor) -> DTensor:
        ctx.mesh, ctx.placements = rows.device_mesh, rows.placements
        return _whole_of(rows)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return _cut(grad, ctx.mesh, ctx.placements)


class _ToLocal(Function):
    @staticmethod
    def forward(ctx: Any, rows: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = rows.device_mesh, rows.placements, rows.shape
        local = rows._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return make_dtensor(grad, ctx.mesh, ctx.placements, ctx.shape)


def _is_cut(value: Any) -> bool:
    if not isinstance(value, DTensor):
        return False
    return type(value) is RowTensor or row_axis(value.placements) is not None


def _wrap(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    kind: type[DTensor] | None = None,
) -> DTensor:
    if kind is None:
        kind = RowTensor if ASKS_SUBCLASSES and row_axis(placements) is not None else DTensor
    meta = TensorMeta(torch.Size(shape), _global_stride(local, shape), local.dtype)
    made: DTensor = kind(local, DTensorSpec(mesh, placements, meta), requires_grad=False)
    return made


def _global_stride(local: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of the whole, without gaps, in the order in which the part lies."""
    if local.dim() != len(shape) or local.is_contiguous():
        return contiguous_stride(shape)
    stride = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def _place_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, int, int]:
    """Return the axis over which rows are cut, the first row here and how many there are."""
    axis = row_axis(placements)
    assert axis is not None
    place: Any = placements[axis]
    return axis, *place.rows_of(mesh.get_local_rank(axis))


def _without_rows(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if isinstance(place, RowShard) else place for place in placements)


def _whole_of(rows: DTensor) -> DTensor:
    """Return a tensor that is cut over no axis of ours; one exchange of rows."""
    mesh, axis = rows.device_mesh, row_axis(rows.placements)
    assert axis is not None
    place: Any = rows.placements[axis]
    whole = place.gather(rows._local_tensor, mesh.get_group(axis))
    if not rows.dim():
        whole = whole.view(())
    return _wrap(whole, mesh, _without_rows(rows.placements), tuple(rows.shape))


def _cut(whole: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    if _is_cut(whole):
        if whole.placements == placements and whole.device_mesh == mesh:
            return whole
        whole = _whole_of(whole)
    kept = _without_rows(placements)
    if whole.placements != kept:
        whole = whole.redistribute(mesh, kept)
    local = _my_rows(whole._local_tensor, mesh, placements).clone()
    return _wrap(local, mesh, placements, tuple(whole.shape))


def _my_rows(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    _, first, num_rows = _place_of(mesh, placements)
    return (whole if whole.dim() else whole.view(1)).narrow(0, first, num_rows)


# Operators


def _dispatch(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    tensors = list(tensors_in([*args, *kwargs.values()]))
    _refuse_lost_writes(func, written_by(func, args, kwargs))
    if not any(_is_cut(tensor) for tensor in tensors):
        return call_with(func, args, kwargs, _as_torch)
    if name == "aten::is_same_size":
        return args[0].shape == args[1].shape
    result = _UNFIT
    if is_local(func):
        result = _run_on_rows(func, args, kwargs)
    elif name in NEW:
        result = _make_new(func, args, kwargs)
    elif name in RANDOM or name.startswith("aten::_amp_foreach_non_finite"):
        result = _run_as_torch(func, args, kwargs)
    elif name in SUMS:
        result = _add_up(func, args, kwargs)
    elif name == "aten::_foreach_norm" and not isinstance(args[0][0], WholeView):
        result = [_norm(tensor, *args[1:], **kwargs) for tensor in args[0]]
    elif len(tensors) == 1 and type(tensors[0]) is RowTensor:
        result = _view_rows(func, tensors[0], args, kwargs)
    return _run_on_whole(func, args, kwargs) if result is _UNFIT else result


def _as_torch(tensor: Tensor) -> Tensor:
    """Return a view of a whole tensor as torch's own class."""
    if type(tensor) is not WholeView:
        return tensor
    spec = tensor._spec
    made: Tensor = DTensor(tensor._local_tensor, spec, requires_grad=tensor.requires_grad)
    return made


def _refuse_lost_writes(func: torch._ops.OpOverload, written: Sequence[Tensor]) -> None:
    if any(type(tensor) is WholeView for tensor in written):
        raise ConfigError(
            f"{func} would write into a view of a sharded parameter whose rows lie on several "
            "ranks; the view is of a copy that was made whole, so the write would be lost. "
            "Remedy: write the rows of each rank, param.to_local(), or the whole parameter "
            "(param.copy_(...), param.mul_(mask))"
        )


# Rows of each rank


def _run_on_rows(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [*args, *kwargs.values()]
    lists = [v for v in values if isinstance(v, list | tuple) and v and isinstance(v[0], Tensor)]
    single = [value for value in values if isinstance(value, Tensor)]
    if lists and any(tensor.dim() for tensor in single):
        return _UNFIT
    if lists:
        count = max(len(items) for items in lists)
        calls = [[*single, *(items[i] for items in lists if items)] for i in range(count)]
    else:
        calls = [single]
    written = {id(tensor) for tensor in written_by(func, args, kwargs)}
    refuse_plain(func, [tensor for call in calls for tensor in call])
    places = [_common_rows(call, written) for call in calls]
    if None in places:
        return _UNFIT
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

    def wrap(value: Any, place: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in originals:
            return originals[id(value)]
        return value if place.spec is None else place.wrap(value)

    if lists and isinstance(result, list | tuple):
        if any(isinstance(item, list | tuple) for item in result):
            return type(result)(
                type(items)(map(wrap, items, places)) if isinstance(items, list) else items
                for items in result
            )
        return type(result)(wrap(value, place) for value, place in zip(result, places, strict=True))
    return map_tensors(lambda value: wrap(value, places[0]), result)


class _Rows:
    """How the operands of one call are cut, and what shape their result has."""

    def __init__(self, spec: DTensorSpec | None, shape: tuple[int, ...]) -> None:
        self.spec = spec
        self.shape = shape

    def wrap(self, local: Tensor) -> DTensor:
        assert self.spec is not None
        return _wrap(local, self.spec.mesh, self.spec.placements, self.shape)


def _common_rows(operands: Sequence[Tensor], written: set[int]) -> _Rows | None:
    """Return what operands that are broadcast have in common; None if they have other rows."""
    shape = tuple(torch.broadcast_shapes(*(tensor.shape for tensor in operands)))
    spread: list[Any] = [tensor for tensor in operands if isinstance(tensor, DTensor)]
    cut = [tensor for tensor in spread if _is_cut(tensor)]
    if not spread:
        return _Rows(None, shape)
    spec = (cut or spread)[0]._spec
    if any(tensor.device_mesh != spec.mesh for tensor in spread):
        return None
    if not cut:
        alike = all(
            tensor.placements == spec.placements and tensor.shape == shape for tensor in spread
        )
        partial = any(isinstance(place, Partial) for place in spec.placements)
        return _Rows(spec, shape) if alike and not partial else None
    if any(tensor.placements != spec.placements for tensor in cut):
        return None
    if any(t.dim() != len(shape) or tuple(t.shape[:1]) != shape[:1] for t in cut):
        return None
    others = [tensor for tensor in spread if not _is_cut(tensor)]
    if any(tensor.dim() and id(tensor) in written for tensor in others):
        return None
    whole = all(isinstance(place, Replicate | RowShard) for place in spec.placements)
    if not whole and not (
        all(tuple(tensor.shape) == shape for tensor in cut)
        and all(tensor.dim() == 0 for tensor in others)
    ):
        return None
    return _Rows(spec, shape)


def _local(tensor: Any, place: _Rows) -> Tensor:
    """Return what this rank needs of an operand; torch makes whole what it has cut itself."""
    if not isinstance(tensor, DTensor):
        return tensor  # type: ignore[no-any-return]
    spec = place.spec
    assert spec is not None
    if _is_cut(tensor) or row_axis(spec.placements) is None:
        return tensor._local_tensor
    kept = (Replicate(),) * spec.mesh.ndim
    tensor = _as_torch(tensor)
    if tensor.placements != kept:
        tensor = tensor.redistribute(spec.mesh, kept)
    whole: Tensor = tensor._local_tensor
    if whole.dim() and whole.dim() == len(place.shape) and whole.shape[0] == place.shape[0]:
        return _my_rows(whole, spec.mesh, spec.placements)
    return whole


def _make_new(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like, size = args[0], tuple(args[1])
    if not isinstance(like, DTensor):
        return _UNFIT
    local, rest = like._local_tensor, args[2:]
    if size == tuple(like.shape) and _is_cut(like) and not func._schema.name.endswith("_strided"):
        made = func(local, list(local.shape), *rest, **kwargs)
        return _wrap(made, like.device_mesh, like.placements, size)
    made = func(local, list(size), *rest, **kwargs)
    return _wrap(made, like.device_mesh, (Replicate(),) * like.device_mesh.ndim, size)


def _view_rows(
    func: torch._ops.OpOverload,
    rows: DTensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return a view in which every rank keeps its rows, for the operators that have one."""
    local, shape = rows._local_tensor, tuple(rows.shape)
    if kwargs or not shape or any(isinstance(p, Shard) for p in _without_rows(rows.placements)):
        return _UNFIT
    rest = args[1:]
    dims = len(shape)
    name = func._schema.name.removeprefix("aten::")
    if name == "as_strided":
        same = tuple(rest[0]) == shape and tuple(rest[1]) == rows.stride()
        here = len(rest) < 3 or rest[2] in (None, rows.storage_offset())
        return _dispatch(_aten.alias.default, (rows,), {}) if same and here else _UNFIT
    if name in ("view", "_unsafe_view"):
        size = resolved(rest[0], rows.numel())
        if not size or size[0] != shape[0] or not rows.numel():
            return _UNFIT
        view = func(local, [local.shape[0], *size[1:]])
        return _wrap(view, rows.device_mesh, rows.placements, size)
    if name == "slice":
        given: tuple[Any, ...] = tuple(rest[1:])
        start, end, step = given + (None, None, 1)[len(given) :]
        if rest[:1] in ((), (0,), (-dims,)):
            everything = start in (None, 0) and (end is None or end >= shape[0]) and step == 1
            return _dispatch(_aten.alias.default, (rows,), {}) if everything else _UNFIT
    keeps_rows = {
        "slice": lambda: rest[0] % dims > 0,
        "select": lambda: rest[0] % dims > 0,
        "transpose": lambda: rest[0] % dims > 0 and rest[1] % dims > 0,
        "unsqueeze": lambda: rest[0] % (dims + 1) > 0,
        "permute": lambda: rest[0][0] % dims == 0,
    }.get(name)
    if keeps_rows is None or not keeps_rows():
        return _UNFIT
    view = func(local, *rest)
    return _wrap(view, rows.device_mesh, rows.placements, (shape[0], *view.shape[1:]))


# Sums and norms


def _stand_in(tensor: Any, local: Tensor | None = None) -> Any:
    """Return the same rows as if torch had cut them.

    Only for operators that neither look at how many rows there are nor move any.
    """
    if not _is_cut(tensor):
        return _as_torch(tensor)
    places = tuple(Shard(0) if isinstance(p, RowShard) else p for p in tensor.placements)
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    local = tensor._local_tensor if local is None else local
    return DTensor(local, DTensorSpec(tensor.device_mesh, places, meta), requires_grad=False)


def _as_rows(value: Any, like: DTensor) -> Any:
    """Return what torch has made of a stand-in, with the placement of our rows again."""
    if not isinstance(value, DTensor):
        return value
    axis = row_axis(like.placements)
    assert axis is not None
    if not value.placements[axis].is_shard():
        return value
    places = tuple(
        like.placements[axis] if at == axis else place for at, place in enumerate(value.placements)
    )
    return _wrap(value._local_tensor, value.device_mesh, places, tuple(value.shape))


def _run_as_torch(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let torch fill or draw the rows of each rank: it knows how random numbers differ there."""
    cut: list[Any] = [t for t in tensors_in([*args, *kwargs.values()]) if _is_cut(t)]
    made = {id(tensor): _stand_in(tensor) for tensor in cut}
    result = call_with(func, args, kwargs, lambda tensor: made.get(id(tensor), _as_torch(tensor)))
    back = {id(made[id(tensor)]): tensor for tensor in cut}
    return map_tensors(
        lambda value: back[id(value)] if id(value) in back else _as_rows(value, cut[0]), result
    )


def _add_up(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    waits: bool = False,
) -> Any:
    """Return a sum or norm over the rows of all ranks.

    ``waits``: torch adds it up when it is asked for it. Not for everybody: torch would add a number
    to the part of every rank.
    """
    rows = args[0]
    if not _is_cut(rows) or not rows.dim() or len(list(tensors_in([*args, *kwargs.values()]))) > 1:
        return _UNFIT
    local = rows._local_tensor
    named = dict(zip((item.name for item in func._schema.arguments), args, strict=False))
    named.update(kwargs)
    dim = named.get("dim")
    over_rows = dim is None or dim in ([], ()) or 0 in [d % rows.dim() for d in dim]
    if func._schema.name == "aten::linalg_vector_norm":
        order = named.get("ord", 2)
        if not order > 0 or (over_rows and dim is not None and len(dim) < rows.dim()):
            return _UNFIT
        if over_rows and not local.shape[0]:
            local = local.new_zeros((1, *local.shape[1:]))  # a norm of no rows is none of them
    result = _as_rows(func(_stand_in(rows, local), *args[1:], **kwargs), rows)
    if waits or _is_cut(result):
        return result
    places = [Replicate() if place.is_partial() else place for place in result.placements]
    return result.redistribute(result.device_mesh, places)


def _norm(tensor: Tensor, order: float = 2, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Return one of a list of norms, which clipping joins first: one exchange for all of them."""
    func = _aten.linalg_vector_norm.default
    args, kwargs = (tensor, order, None, False), {"dtype": kwargs.get("dtype", dtype)}
    norm = _add_up(func, args, kwargs, waits=True) if _is_cut(tensor) else func(*args, **kwargs)
    return func(*args, **kwargs) if norm is _UNFIT else norm


# Whole tensors


def _run_on_whole(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operator on whole tensors, for which all ranks exchange their rows."""
    tensors = list(tensors_in([*args, *kwargs.values()]))
    refuse_whole(func)
    refuse_plain(func, tensors)
    found: dict[int, Any] = {}
    for tensor in tensors:
        if _is_cut(tensor) and id(tensor) not in found:
            found[id(tensor)] = _whole_of(tensor)  # type: ignore[arg-type]
    wholes: list[Any] = [
        found.get(id(tensor), _as_torch(tensor))
        for tensor in tensors
        if isinstance(tensor, DTensor)
    ]
    mesh = wholes[0].device_mesh
    plain = all(
        whole.device_mesh == mesh and all(place.is_replicate() for place in whole.placements)
        for whole in wholes
    )
    pairs = {}
    for tensor in tensors:
        whole = found.get(id(tensor), _as_torch(tensor))
        pairs[id(tensor)] = whole._local_tensor if plain and isinstance(whole, DTensor) else whole
    shapes = {key: whole.shape for key, whole in found.items()}
    result = call_with(func, args, kwargs, lambda tensor: pairs[id(tensor)])
    written = written_by(func, args, kwargs)
    for tensor in written:
        if id(tensor) in found:
            _write_back(func, tensor, found[id(tensor)], shapes[id(tensor)])
    originals = {id(pairs[id(tensor)]): tensor for tensor in written}
    kind = WholeView if is_view(func) else DTensor

    def wrap(value: Tensor) -> Tensor:
        if id(value) in originals:
            return originals[id(value)]
        if isinstance(value, DTensor):
            if kind is DTensor:
                return value
            view: Any = WholeView
            made: Tensor = view(value._local_tensor, value._spec, requires_grad=False)
            return made
        if not plain:
            return value
        return _wrap(value, mesh, (Replicate(),) * mesh.ndim, tuple(value.shape), kind)

    return map_tensors(wrap, result)


def _write_back(func: torch._ops.OpOverload, rows: Any, whole: DTensor, shape: torch.Size) -> None:
    if whole._local_tensor.dim() != len(shape) or whole.shape != shape:
        raise ConfigError(
            f"{func} has changed the shape of a sharded parameter from {tuple(shape)}; it has been "
            "left as it was. Remedy: a new tensor"
        )
    mine = _my_rows(whole._local_tensor, rows.device_mesh, rows.placements)
    rows._local_tensor.copy_(mine)
