"""Whole matrices from the parts that ranks hold, all of them in one collective per mesh axis.

Shapes: A, B = rows and columns of a matrix; S = elements of one rank's parts of all matrices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collectives import all_gather_
from graphfsdp.base.dtensors import is_dtensor

Ranges = list[tuple[int, int]]  # where each rank's part begins along a dim, and how long it is


@dataclass(frozen=True)
class Cut:
    """How one axis cuts what earlier ones left of a matrix: ``dim`` 0 by rows, 1 by columns."""

    group: dist.ProcessGroup
    dim: int
    ranges: Ranges


def cuts_of(param: Tensor) -> list[Cut]:
    """Return how a DTensor is cut, axis by axis in the order of cutting; none for a plain one."""
    if not is_dtensor(param):
        return []
    dtensor: Any = param
    sizes, found = list(param.shape), []
    for axis, place in enumerate(dtensor.placements):
        if place.is_replicate():
            continue
        group = dtensor.device_mesh.get_group(axis)
        ranges = _ranges(place, sizes[place.dim], group.size())
        found.append(Cut(group, place.dim, ranges))
        sizes[place.dim] = ranges[group.rank()][1]
    return found


def _ranges(place: Any, size: int, num_ranks: int) -> Ranges:
    rows_of = getattr(place, "rows_of", None)  # fully_shard's own placement
    if rows_of is not None:
        return [rows_of(rank) for rank in range(num_ranks)]
    chunk = -(-size // num_ranks)  # torch.chunk's
    firsts = [min(rank * chunk, size) for rank in range(num_ranks)]
    return [(first, min(chunk, size - first)) for first in firsts]


def gather_rows(
    params: Sequence[Tensor],  # [A, B] each, DTensors or plain
    parts: Sequence[Tensor],  # [rows here, columns here] each, of one dtype and device
) -> list[Tensor]:
    """Return the whole matrices, [A, B] each; what no rank shares is returned as it is.

    Capture: no host sync; one collective for each group of ranks.
    """
    found = list(parts)
    waiting = [cuts_of(param) for param in params]
    while any(waiting):
        # The last cut is undone first.
        by_group: dict[dist.ProcessGroup, list[tuple[int, Cut]]] = {}
        for index, cuts in enumerate(waiting):
            if cuts:
                cut = cuts.pop()
                by_group.setdefault(cut.group, []).append((index, cut))
        for group, members in by_group.items():
            whole = _gather_group(
                [found[index] for index, _ in members], [cut for _, cut in members], group
            )
            for (index, _), matrix in zip(members, whole, strict=True):
                found[index] = matrix
    return found


def own_rows(param: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole matrix, a view."""
    for cut in cuts_of(param):
        first, length = cut.ranges[cut.group.rank()]
        whole = whole.narrow(cut.dim, first, length)
    return whole


def _gather_group(
    parts: Sequence[Tensor], cuts: Sequence[Cut], group: dist.ProcessGroup
) -> list[Tensor]:
    num_ranks, here = group.size(), group.rank()
    # Where each matrix begins among the parts of each rank.
    shapes = [
        [_piece_shape(part, cut, rank) for rank in range(num_ranks)]
        for part, cut in zip(parts, cuts, strict=True)
    ]
    starts = [
        [0, *accumulate(math.prod(of_ranks[rank]) for of_ranks in shapes)]
        for rank in range(num_ranks)
    ]
    shard_numel = max(start[-1] for start in starts)
    packed = torch.zeros(shard_numel, dtype=parts[0].dtype, device=parts[0].device)
    packed[: starts[here][-1]].copy_(torch.cat([part.reshape(-1) for part in parts]))
    everyone = torch.empty(num_ranks * shard_numel, dtype=packed.dtype, device=packed.device)
    all_gather_(everyone, packed, group)
    return [
        torch.cat(
            [
                everyone.narrow(
                    0,
                    rank * shard_numel + starts[rank][index],
                    math.prod(shapes[index][rank]),
                ).view(shapes[index][rank])
                for rank in _in_order(cut.ranges)
            ],
            dim=cut.dim,
        )
        for index, cut in enumerate(cuts)
    ]


def _piece_shape(part: Tensor, cut: Cut, rank: int) -> list[int]:
    shape = list(part.shape)
    shape[cut.dim] = cut.ranges[rank][1]
    return shape


def _in_order(ranges: Ranges) -> list[int]:
    return sorted(range(len(ranges)), key=lambda rank: ranges[rank])
