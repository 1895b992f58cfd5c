"""The DTensor placement of a unit's parameters: whole rows, as many as happen to fall on a rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from graphfsdp.base.collectives import all_gather_


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
        """Return [rows, ...] of all ranks, of which no view is made. Capture: one exchange."""
        group = mesh.get_group(mesh_dim)
        counts = [self.rows_of(rank)[1] for rank in range(group.size())]
        padded = local_tensor.new_zeros((max(counts), *local_tensor.shape[1:]))
        padded[: local_tensor.shape[0]] = local_tensor
        parts = padded.new_empty((len(counts), *padded.shape))
        if padded.numel():
            all_gather_(parts.view(-1), padded.view(-1), group)
        found = [part[:count] for part, count in zip(parts, counts, strict=True)]
        if self.order is not None:
            found = [found[self.order.index(part)] for part in range(len(found))]
        return torch.cat(found)


# As torch does it for its own placements: torch.load takes weights_only=True by default.
torch.serialization.add_safe_globals([RowShard])
