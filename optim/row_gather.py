"""Whole matrices from the rows that ranks hold, all of them in one collective.

Shapes: A, B = rows and columns of a matrix; S = elements of one rank's rows of all matrices.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.collectives import all_gather_
from graphfsdp.dtensors import sharding_group


def row_ranges(param: Tensor, num_ranks: int) -> list[tuple[int, int]]:
    """Return the first row of a DTensor with ``Shard(0)`` on each rank, and how many it holds."""
    dtensor: Any = param
    for place in dtensor.placements:
        rows_of = getattr(place, "rows_of", None)  # fully_shard's own placement
        if rows_of is not None:
            return [rows_of(rank) for rank in range(num_ranks)]
    num_rows = param.shape[0]
    chunk = -(-num_rows // num_ranks)  # torch.chunk's
    firsts = [min(rank * chunk, num_rows) for rank in range(num_ranks)]
    return [(first, min(chunk, num_rows - first)) for first in firsts]


def gather_rows(
    params: Sequence[Tensor],  # [A, B] each, DTensors or plain
    rows: Sequence[Tensor],  # [rows here, B] each, of one dtype and device
) -> list[Tensor]:
    """Return the whole matrices, [A, B] each; what no rank shares is returned as it is.

    Capture: no host sync; one collective for each group of ranks.
    """
    found = list(rows)
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for index, param in enumerate(params):
        group = sharding_group(param)
        if group is not None:
            by_group.setdefault(group, []).append(index)
    for group, indices in by_group.items():
        whole = _gather_group([params[i] for i in indices], [rows[i] for i in indices], group)
        for index, matrix in zip(indices, whole, strict=True):
            found[index] = matrix
    return found


def own_rows(param: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's rows of a whole matrix, a view."""
    group = sharding_group(param)
    if group is None:
        return whole
    first, num_rows = row_ranges(param, group.size())[group.rank()]
    return whole.narrow(0, first, num_rows)


def _gather_group(
    params: Sequence[Tensor], rows: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Tensor]:
    num_ranks = group.size()
    ranges = [row_ranges(param, num_ranks) for param in params]
    columns = [param.shape[1] for param in params]
    # Where each matrix begins among the rows of each rank.
    starts = [
        [0, *accumulate(held[rank][1] * width for held, width in zip(ranges, columns, strict=True))]
        for rank in range(num_ranks)
    ]
    shard_numel = max(start[-1] for start in starts)
    packed = torch.zeros(shard_numel, dtype=rows[0].dtype, device=rows[0].device)
    packed[: starts[group.rank()][-1]].copy_(torch.cat([part.reshape(-1) for part in rows]))
    everyone = torch.empty(num_ranks * shard_numel, dtype=packed.dtype, device=packed.device)
    all_gather_(everyone, packed, group)
    return [
        torch.cat(
            [
                everyone.narrow(0, rank * shard_numel + starts[rank][index], num_rows * width)
                for _, num_rows, rank in _by_row(ranges[index])
            ]
        ).view(sum(num_rows for _, num_rows in ranges[index]), width)
        for index, width in enumerate(columns)
    ]


def _by_row(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return first row, number of rows and rank, in the order of the rows."""
    return sorted((first, num_rows, rank) for rank, (first, num_rows) in enumerate(ranges))


__all__ = ["gather_rows", "own_rows", "row_ranges"]
