"""How rows are cut: which lie where, and which operands have the same ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from graphfsdp.base.flat_buffer import contiguous_stride
from graphfsdp.base.torch_internals import known_spec, local_tensor_of, spec_of
from graphfsdp.sharding.placement import RowShard


def row_axis(placements: Sequence[Placement]) -> int | None:
    """Return the mesh axis over which rows are cut, if any."""
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


def place_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, int, int]:
    """Return the axis over which rows are cut, the first row here and how many there are."""
    axis = row_axis(placements)
    assert axis is not None
    place: Any = placements[axis]
    return axis, *place.rows_of(mesh.get_local_rank(axis))


def without_rows(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if isinstance(place, RowShard) else place for place in placements)


def my_rows(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    _, first, num_rows = place_of(mesh, placements)
    return (whole if whole.dim() else whole.view(1)).narrow(0, first, num_rows)


def wrap_rows(
    rows_as: type[DTensor],
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> DTensor:
    """Return a part as a DTensor, of the given class where rows are cut."""
    kind: Any = DTensor if row_axis(placements) is None else rows_as
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
    return wrap_rows(DTensor, whole, mesh, without_rows(rows.placements), tuple(rows.shape))


class CommonRows:
    """How the operands of one call are cut, what shape their result has, and which class."""

    def __init__(self, spec: Any, shape: tuple[int, ...], rows_as: type[DTensor] = DTensor) -> None:
        self.spec = spec
        self.shape = shape
        self.rows_as = rows_as


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
    if any(tensor.placements != spec.placements for tensor in cut):
        return None
    if any(t.dim() != len(shape) or tuple(t.shape[:1]) != shape[:1] for t in cut):
        return None
    others = [tensor for tensor in spread if not is_cut(tensor)]
    if any(tensor.dim() and id(tensor) in written for tensor in others):
        return None
    whole = all(isinstance(place, Replicate | RowShard) for place in spec.placements)
    if not whole and not (
        all(tuple(tensor.shape) == shape for tensor in cut)
        and all(tensor.dim() == 0 for tensor in others)
    ):
        return None
    return CommonRows(spec, shape, type(cut[0]))
