"""What ``model.parameters()`` shows of a sharded unit: DTensors that handle operators themselves.

torch's DTensor takes for granted that ``torch.chunk`` has cut a tensor. So nothing here is asked of
it for a tensor that is cut otherwise. An operator runs

- on the rows of each rank, where it works element by element and all operands have the same rows;
  the result has these rows again;
- for sums and norms on the rows of each rank, whose results are added up;
- else on whole tensors, for which all ranks exchange their rows. The result is whole on every rank.
  What such an operator writes in place goes back into the rows, and so does what is written later
  into a view of such a whole tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optim_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_types

from graphfsdp.base.op_tensors import OpCall, flat_tensors
from graphfsdp.base.torch_internals import (
    ASKS_SUBCLASSES,
    OpOverload,
    known_spec,
    local_tensor_of,
    schema_of,
    spec_of,
)
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.placement import RowShard
from graphfsdp.sharding.rows.operators import (
    NEW,
    RANDOM,
    SUMS,
    call_with,
    is_local,
    is_view,
    map_tensors,
    refuse_plain,
    refuse_whole,
    view_of_rows,
)
from graphfsdp.sharding.rows.parts import (
    CommonRows,
    common_rows,
    global_stride,
    is_cut,
    my_rows,
    row_axis,
    without_rows,
)

_aten = torch.ops.aten

_UNFIT = object()  # no result: the operands do not have the same rows


class _Dispatched(DTensor):
    """A DTensor whose operators are run here and not by torch."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, tuple(args), dict(kwargs or {}))


class RowTensor(_Dispatched):
    """A DTensor whose rows are cut as a ``RowShard`` says, evenly or not."""

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


class WholeView(_Dispatched):
    """A view of a tensor that had to be made whole.

    ``_copied``: the copy and the rows that it was made of, which see what is written into the view,
    and are asked for again if somebody has written them; None if that cannot be done.
    """

    _copied: "Copied | None" = None


class Copied:
    """A whole copy of rows, for views of it."""

    def __init__(self, rows: DTensor, whole: Tensor) -> None:
        self._rows = rows
        self._whole = whole
        self._moment = self._now()

    def _now(self) -> int:
        # Writes into the rows count there alone, those into what autograd takes for their views
        # (ours among them) with the rows.
        both = (self._rows, local_tensor_of(self._rows))
        return sum(-1 if tensor.is_inference() else tensor._version for tensor in both)

    def refresh(self) -> None:
        """Gather again what was written since; all ranks have written it, or none has."""
        if self._now() != self._moment:
            self._whole.copy_(local_tensor_of(whole_of(self._rows)))
            self._moment = self._now()

    def write_back(self) -> None:
        rows = self._rows
        local_tensor_of(rows).copy_(my_rows(self._whole, rows.device_mesh, rows.placements))
        self._moment = self._now()


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
    made = wrap_rows(local.detach(), mesh, tuple(placements), tuple(shape))
    return made


class _Gather(Function):
    """From rows to the whole tensor, and back."""

    @staticmethod
    def forward(ctx: Any, rows: DTensor) -> DTensor:
        ctx.mesh, ctx.placements = rows.device_mesh, rows.placements
        return whole_of(rows)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return cut_like(grad, ctx.mesh, ctx.placements)


class _ToLocal(Function):
    @staticmethod
    def forward(ctx: Any, rows: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = rows.device_mesh, rows.placements, rows.shape
        local = local_tensor_of(rows)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return make_dtensor(grad, ctx.mesh, ctx.placements, ctx.shape)


def wrap_rows(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> DTensor:
    kind: Any = RowTensor if ASKS_SUBCLASSES and row_axis(placements) is not None else DTensor
    spec = spec_of(mesh, placements, shape, global_stride(local, shape), local.dtype)
    # torch would take the storage offset of the part, and then look for a storage that it copies.
    at_start = local.new_empty(0) if local.storage_offset() else local
    made: DTensor = kind(at_start, spec, requires_grad=False)
    made._local_tensor = local
    return made


def whole_of(rows: DTensor) -> DTensor:
    """Return a tensor that is cut over no axis of ours; one exchange of rows."""
    mesh, axis = rows.device_mesh, row_axis(rows.placements)
    assert axis is not None
    place: Any = rows.placements[axis]
    whole = place.gather(local_tensor_of(rows), mesh.get_group(axis))
    if not rows.dim():
        whole = whole.view(())
    return wrap_rows(whole, mesh, without_rows(rows.placements), tuple(rows.shape))


def cut_like(whole: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    if is_cut(whole):
        if whole.placements == placements and whole.device_mesh == mesh:
            return whole
        whole = whole_of(whole)
    kept = without_rows(placements)
    if whole.placements != kept:
        whole = whole.redistribute(mesh, kept)
    local = my_rows(local_tensor_of(whole), mesh, placements).clone()
    return wrap_rows(local, mesh, placements, tuple(whole.shape))


# Operators


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = flat_tensors([*args, *kwargs.values()])
    views = [tensor for tensor in tensors if type(tensor) is WholeView]
    if views:
        return _run_with_views(func, args, kwargs, views)
    return _run_cut(func, args, kwargs, tensors)


def _run_cut(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
) -> Any:
    name = schema_of(func).name
    if not any(is_cut(tensor) for tensor in tensors):
        return func(*args, **kwargs)
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
    elif name == "aten::_foreach_norm":
        result = [_norm(tensor, *args[1:], **kwargs) for tensor in args[0]]
    elif len(tensors) == 1 and type(tensors[0]) is RowTensor:
        result = _view_rows(func, tensors[0], args, kwargs)
    return _run_on_whole(func, args, kwargs) if result is _UNFIT else result


def _run_with_views(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    views: Sequence["WholeView"],
) -> Any:
    """Run an operator on views of whole copies, whose rows see what it writes."""
    written = [tensor for tensor in OpCall(func, args, kwargs).written if type(tensor) is WholeView]
    if any(view._copied is None for view in written):
        raise ConfigError(
            f"{func} would write into a view of a sharded parameter whose rows lie on several "
            "ranks; the view is of a copy that was made whole, so the write would be lost. "
            "Remedy: write the rows of each rank, param.to_local(), or the whole parameter "
            "(param.copy_(...), param.mul_(mask))"
        )
    for view in views:
        if view._copied is not None:
            view._copied.refresh()
    # Kept until the results are known, so that no identity is taken twice.
    made = {id(view): _as_torch(view) for view in views}
    new_args = map_tensors(lambda tensor: made.get(id(tensor), tensor), args)
    new_kwargs = {
        name: map_tensors(lambda tensor: made.get(id(tensor), tensor), value)
        for name, value in kwargs.items()
    }
    tensors = flat_tensors([*new_args, *new_kwargs.values()])
    result = _run_cut(func, tuple(new_args), new_kwargs, tensors)
    for view in written:
        assert view._copied is not None
        view._copied.write_back()
    originals = {id(made[id(view)]): view for view in views}

    def wrap(value: Tensor) -> Tensor:
        if id(value) in originals:
            return originals[id(value)]
        if is_view(func) and type(value) is DTensor:
            return _view(value, views[0]._copied)
        return value

    return map_tensors(wrap, result)


def _as_torch(view: "WholeView") -> DTensor:
    """Return a view of a whole tensor as torch's own class."""
    return DTensor(local_tensor_of(view), known_spec(view), requires_grad=view.requires_grad)


def _view(whole: DTensor, copied: "Copied | None") -> WholeView:
    kind: Any = WholeView
    made: WholeView = kind(local_tensor_of(whole), known_spec(whole), requires_grad=False)
    made._copied = copied
    return made


# Rows of each rank


def _run_on_rows(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    written = {id(tensor) for tensor in OpCall(func, args, kwargs).written}
    refuse_plain(func, [tensor for call in calls for tensor in call])
    places = [common_rows(call, written) for call in calls]
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
        return value if place.spec is None else _wrap_common(value, place)

    if lists and isinstance(result, list | tuple):
        if any(isinstance(item, list | tuple) for item in result):
            return type(result)(
                type(items)(map(wrap, items, places)) if isinstance(items, list) else items
                for items in result
            )
        return type(result)(wrap(value, place) for value, place in zip(result, places, strict=True))
    return map_tensors(lambda value: wrap(value, places[0]), result)


def _wrap_common(local: Tensor, place: CommonRows) -> DTensor:
    assert place.spec is not None
    return wrap_rows(local, place.spec.mesh, place.spec.placements, place.shape)


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


def _make_new(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like, size = args[0], tuple(args[1])
    if not isinstance(like, DTensor):
        return _UNFIT
    local, rest = local_tensor_of(like), args[2:]
    if size == tuple(like.shape) and is_cut(like) and not schema_of(func).name.endswith("_strided"):
        made = func(local, list(local.shape), *rest, **kwargs)
        return wrap_rows(made, like.device_mesh, like.placements, size)
    made = func(local, list(size), *rest, **kwargs)
    return wrap_rows(made, like.device_mesh, (Replicate(),) * like.device_mesh.ndim, size)


def _view_rows(
    func: OpOverload,
    rows: DTensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return a view in which every rank keeps its rows, for the operators that have one."""
    if kwargs or any(isinstance(p, Shard) for p in without_rows(rows.placements)):
        return _UNFIT
    same_place = (rows.stride(), rows.storage_offset())
    found = view_of_rows(func, local_tensor_of(rows), tuple(rows.shape), same_place, args[1:])
    return (
        _UNFIT
        if found is None
        else wrap_rows(found[0], rows.device_mesh, rows.placements, found[1])
    )


# Sums and norms


def _stand_in(tensor: Any, local: Tensor | None = None) -> Any:
    """Return the same rows as if torch had cut them.

    Only for operators that neither look at how many rows there are nor move any.
    """
    if not is_cut(tensor):
        return tensor
    places = tuple(Shard(0) if isinstance(p, RowShard) else p for p in tensor.placements)
    mesh, dtype = tensor.device_mesh, tensor.dtype
    spec = spec_of(mesh, places, tensor.shape, tensor.stride(), dtype)
    local = local_tensor_of(tensor) if local is None else local
    return DTensor(local, spec, requires_grad=False)


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
    return wrap_rows(local_tensor_of(value), value.device_mesh, places, tuple(value.shape))


def _run_as_torch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let torch fill or draw the rows of each rank: it knows how random numbers differ there."""
    cut: list[Any] = [t for t in flat_tensors([*args, *kwargs.values()]) if is_cut(t)]
    made = {id(tensor): _stand_in(tensor) for tensor in cut}
    result = call_with(func, args, kwargs, lambda tensor: made.get(id(tensor), tensor))
    back = {id(made[id(tensor)]): tensor for tensor in cut}
    return map_tensors(
        lambda value: back[id(value)] if id(value) in back else _as_rows(value, cut[0]), result
    )


def _add_up(
    func: OpOverload,
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
    if not is_cut(rows) or not rows.dim() or len(flat_tensors([*args, *kwargs.values()])) > 1:
        return _UNFIT
    local = local_tensor_of(rows)
    named = dict(zip((item.name for item in schema_of(func).arguments), args, strict=False))
    named.update(kwargs)
    dim = named.get("dim")
    over_rows = dim is None or dim in ([], ()) or 0 in [d % rows.dim() for d in dim]
    if schema_of(func).name == "aten::linalg_vector_norm":
        order = named.get("ord", 2)
        if not order > 0 or (over_rows and dim is not None and len(dim) < rows.dim()):
            return _UNFIT
        if over_rows and not local.shape[0]:
            local = local.new_zeros((1, *local.shape[1:]))  # a norm of no rows is none of them
    result = _as_rows(func(_stand_in(rows, local), *args[1:], **kwargs), rows)
    if waits or is_cut(result):
        return result
    places = [Replicate() if place.is_partial() else place for place in result.placements]
    return result.redistribute(result.device_mesh, places)


def _norm(tensor: Tensor, order: float = 2, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Return one of a list of norms, which clipping joins first: one exchange for all of them."""
    func = _aten.linalg_vector_norm.default
    args, kwargs = (tensor, order, None, False), {"dtype": kwargs.get("dtype", dtype)}
    norm = _add_up(func, args, kwargs, waits=True) if is_cut(tensor) else func(*args, **kwargs)
    return func(*args, **kwargs) if norm is _UNFIT else norm


# Whole tensors


def _run_on_whole(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on whole tensors, for which all ranks exchange their rows."""
    tensors = flat_tensors([*args, *kwargs.values()])
    refuse_whole(func)
    refuse_plain(func, tensors)
    found: dict[int, Any] = {}
    for tensor in tensors:
        if is_cut(tensor) and id(tensor) not in found:
            found[id(tensor)] = whole_of(tensor)  # type: ignore[arg-type]
    wholes: list[Any] = [
        found.get(id(tensor), tensor) for tensor in tensors if isinstance(tensor, DTensor)
    ]
    mesh = wholes[0].device_mesh
    plain = all(
        whole.device_mesh == mesh and all(place.is_replicate() for place in whole.placements)
        for whole in wholes
    )
    pairs = {}
    for tensor in tensors:
        whole = found.get(id(tensor), tensor)
        pairs[id(tensor)] = (
            local_tensor_of(whole) if plain and isinstance(whole, DTensor) else whole
        )
    shapes = {key: whole.shape for key, whole in found.items()}
    result = call_with(func, args, kwargs, lambda tensor: pairs[id(tensor)])
    written = OpCall(func, args, kwargs).written
    for tensor in written:
        if id(tensor) in found:
            _write_back(func, tensor, found[id(tensor)], shapes[id(tensor)])
    originals = {id(pairs[id(tensor)]): tensor for tensor in written}
    copied = None
    if plain and len(found) == 1:
        (rows,) = {id(tensor): tensor for tensor in tensors if id(tensor) in found}.values()
        copied = Copied(rows, local_tensor_of(found[id(rows)]))  # type: ignore[arg-type]

    def wrap(value: Tensor) -> Tensor:
        if id(value) in originals:
            return originals[id(value)]
        if plain and not isinstance(value, DTensor):
            value = wrap_rows(value, mesh, (Replicate(),) * mesh.ndim, tuple(value.shape))
        if is_view(func) and isinstance(value, DTensor):
            return _view(value, copied)
        return value

    return map_tensors(wrap, result)


def _write_back(func: OpOverload, rows: Any, whole: DTensor, shape: torch.Size) -> None:
    if local_tensor_of(whole).dim() != len(shape) or whole.shape != shape:
        raise ConfigError(
            f"{func} has changed the shape of a sharded parameter from {tuple(shape)}; it has been "
            "left as it was. Remedy: a new tensor"
        )
    mine = my_rows(local_tensor_of(whole), rows.device_mesh, rows.placements)
    local_tensor_of(rows).copy_(mine)
