"""The DTensor placement of a unit's parameters: whole rows, as many as happen to fall on a rank.

And which rows of a tensor lie where, and which operands of an operator have the same ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from graphfsdp.base.collectives import all_gather_
from graphfsdp.base.flat_buffer import contiguous_stride
from graphfsdp.base.torch_internals import known_spec, local_tensor_of, spec_of


class RowShard(Shard):
    """``Shard(0)`` with any number of rows per rank.

    It knows which rows each rank holds, where ``Shard`` takes for granted that ``torch.chunk`` has
    cut the tensor: so torch.distributed.checkpoint finds the right rows (``distribute_tensor`` does
    not: torch puts a plain ``Shard`` in the place of any child of it). Operators on tensors with
    it are those of ``RowTensor``, never torch's for shards.

    ``borders``: first row of each part, and behind the last one the number of rows. ``order``:
    which part each rank holds; None if they are in the order of the ranks.
    """

    borders: tuple[int, ...]
    order: tuple[int, ...] | None

    def __init__(self, borders: Sequence[int], order: Sequence[int] | None = None) -> None:
        super().__init__(0)
        self.borders = tuple(borders)
        self.order = None if order is None else tuple(order)

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Return the first row that a rank holds, and how many it holds."""
        part = rank if self.order is None else self.order[rank]
        return self.borders[part], self.borders[part + 1] - self.borders[part]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowShard):
            return self.borders == other.borders and self.order == other.order
        # Shard(0), so that torch makes DTensors with it. It looks up by equal placements what it
        # has worked out for an operator, but never for a RowTensor.
        return super().__eq__(other)  # maybe NotImplemented, which bool() would take for True

    def __hash__(self) -> int:
        return hash((type(self), self.borders, self.order))

    def __repr__(self) -> str:
        return f"RowShard({self.borders}{'' if self.order is None else f', {self.order}'})"

    def __reduce__(self) -> tuple[type["RowShard"], tuple[Any, ...]]:
        return (type(self), (self.borders, self.order))

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, Any]:
        """Return how many rows a rank holds, and the first of them."""
        assert (curr_local_size, num_chunks) == (self.borders[-1], len(self.borders) - 1)
        first, num_rows = self.rows_of(rank)
        return num_rows, first

    def _to_replicate_tensor(
        self,
        local_tensor: Tensor,  # [rows here, ...]
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[Any],
    ) -> Tensor:
        """Return the whole tensor, of whose rows no view is made; one exchange of rows."""
        assert current_logical_shape[0] == self.borders[-1]
        return self.gather(local_tensor, mesh.get_group(mesh_dim))

    def gather(
        self,
        local: Tensor,  # [rows here, ...]
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Return [rows, ...] of all ranks; one exchange. Capture: one node for it."""
        counts = [self.rows_of(rank)[1] for rank in range(group.size())]
        padded = local.new_zeros((max(counts), *local.shape[1:]))
        padded[: local.shape[0]] = local
        parts = padded.new_empty((len(counts), *padded.shape))
        if padded.numel():
            all_gather_(parts.view(-1), padded.view(-1), group)
        found = [part[:count] for part, count in zip(parts, counts, strict=True)]
        if self.order is not None:
            found = [found[self.order.index(part)] for part in range(len(found))]
        return torch.cat(found)


# As torch does it for its own placements: torch.load takes weights_only=True by default.
torch.serialization.add_safe_globals([RowShard])


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


def without_rows(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if isinstance(place, RowShard) else place for place in placements)


def my_rows(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    axis = row_axis(placements)
    assert axis is not None
    place: Any = placements[axis]
    rows = whole if whole.dim() else whole.view(1)
    return rows.narrow(0, *place.rows_of(mesh.get_local_rank(axis)))


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


class CommonRows(NamedTuple):
    """How the operands of one call are cut, what shape their result has, and which class."""

    spec: Any
    shape: tuple[int, ...]
    rows_as: type[DTensor] = DTensor


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
