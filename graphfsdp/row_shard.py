"""The DTensor placement of a unit's parameters: whole rows, as many as happen to fall on a rank."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard


class RowShard(Shard):
    """``Shard(0)`` with any number of rows per rank.

    It equals ``Shard(0)`` for every operator that works on local rows. ``full_tensor`` and
    ``redistribute`` ask the other ranks how many rows they hold, where ``Shard`` takes for granted
    that ``torch.chunk`` has cut the tensor. Results of arithmetic carry plain ``Shard(0)`` again:
    take ``full_tensor`` of parameters, gradients and their detached or saved copies.
    """

    def __init__(self) -> None:
        super().__init__(0)

    def __hash__(self) -> int:
        # Unlike Shard(0), so that torch does not reuse what it has worked out for one of them.
        return hash((type(self), self.dim))

    def __repr__(self) -> str:
        return "RowShard()"

    def __reduce__(self) -> tuple[type["RowShard"], tuple[()]]:
        return (type(self), ())

    def _to_replicate_tensor(
        self,
        local_tensor: Tensor,  # [rows here, ...]
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[Any],
    ) -> Tensor:
        """Return the whole tensor; one exchange of row counts, then one of rows."""
        group = mesh.get_group(mesh_dim)
        counts = _row_counts(local_tensor, group)
        longest = max(counts)
        padded = local_tensor.new_zeros((longest, *current_logical_shape[1:]))
        padded[: local_tensor.shape[0]] = local_tensor
        parts = [torch.empty_like(padded) for _ in counts]
        if padded.numel():
            dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _row_counts(local: Tensor, group: dist.ProcessGroup) -> list[int]:
    mine = torch.tensor([local.shape[0]], device=local.device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return [int(count) for count in everyone]


__all__ = ["RowShard"]
