"""Whole matrices from the rows that ranks hold, all of them in one collective.

Shapes: A, B = rows and columns of a matrix; S = elements of one rank's rows of all matrices.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.collectives import all_gather_
from graphfsdp.dtensors import sharding_group


def row_counts(param: Tensor, num_ranks: int) -> list[int]:
    """Return how many rows of a DTensor with ``Shard(0)`` each rank holds."""
    dtensor: Any = param
    for place in dtensor.placements:
        borders = getattr(place, "borders", None)  # fully_shard's own placement
        if borders is not None:
            return [end - first for first, end in pairwise(borders)]
    num_rows = param.shape[0]
    chunk = -(-num_rows // num_ranks)  # torch.chunk's
    return [max(0, min(chunk, num_rows - rank * chunk)) for rank in range(num_ranks)]


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
    counts, rank = row_counts(param, group.size()), group.rank()
    return whole.narrow(0, sum(counts[:rank]), counts[rank])


def _gather_group(
    params: Sequence[Tensor], rows: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Tensor]:
    num_ranks = group.size()
    counts = [row_counts(param, num_ranks) for param in params]
    columns = [param.shape[1] for param in params]
    # Where each matrix begins among the rows of each rank.
    starts = [
        [0, *accumulate(count[rank] * width for count, width in zip(counts, columns, strict=True))]
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
                everyone.narrow(0, rank * shard_numel + starts[rank][index], count * width)
                for rank, count in enumerate(counts[index])
            ]
        ).view(sum(counts[index]), width)
        for index, width in enumerate(columns)
    ]


__all__ = ["gather_rows", "own_rows", "row_counts"]
