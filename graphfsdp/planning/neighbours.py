"""Which pieces of memory lie side by side once all units are together: bytes and borders."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from graphfsdp.base.memory_plan import neighbour_starts
from graphfsdp.sharding.plan import BufferPlan

_BORDER_NUMEL = 64  # state that does not continue its neighbour starts on such a border


class Piece(NamedTuple):
    """This rank's rows of one parameter in the storage of the main weights.

    Attributes:
        group: Number of the optimizer's group.
        start: First element.
        numel: Elements.
    """

    group: int
    start: int
    numel: int


_Kind = tuple[torch.dtype, bool]


def storage_bytes(buffers: Sequence[BufferPlan], *, of_grads: bool) -> int:
    """Return the bytes of the storages that hold all units' main weights, or main grads."""
    total = 0
    for (dtype, trainable), members in _by_kind(buffers).items():
        numels = [buffer.main_numel for buffer in members]
        if not of_grads:
            total += neighbour_starts(numels, dtype.itemsize)[-1] * dtype.itemsize
        elif trainable:
            itemsize = members[0].dtypes.grad.itemsize
            total += neighbour_starts(numels, itemsize)[-1] * itemsize
    return total


def state_numel(buffers: Sequence[BufferPlan], rank: int) -> int:
    """Return the elements of one moment of all trainable parameters on a rank.

    FusedAdam keeps a moment in one buffer per dtype, in the order of the main weights; what does
    not continue its neighbour starts on a border.
    """
    total = 0
    for pieces in _pieces(buffers, rank):
        end = 0
        previous: Piece | None = None
        for piece in sorted(pieces):
            if previous is None or previous.start + previous.numel != piece.start:
                end = -(-end // _BORDER_NUMEL) * _BORDER_NUMEL
            end += piece.numel
            previous = piece
        total += end
    return total


def _pieces(buffers: Sequence[BufferPlan], rank: int) -> Iterator[list[Piece]]:
    for (dtype, trainable), members in _by_kind(buffers).items():
        if not trainable:
            continue
        starts = neighbour_starts([buffer.main_numel for buffer in members], dtype.itemsize)
        pieces = []
        for buffer, start in zip(members, starts, strict=False):
            for slot in buffer.layout.slots:
                group = 0 if len(slot.shape) >= 2 else 1  # matrices, vectors
                if buffer.sharded:
                    rows = buffer.layout.local_rows(slot, rank)
                    pieces.append(Piece(group, start + rows.shard_offset, rows.numel))
                else:
                    pieces.append(Piece(group, start + slot.offset, slot.numel))
        yield pieces


def _by_kind(buffers: Sequence[BufferPlan]) -> Mapping[_Kind, list[BufferPlan]]:
    kinds: dict[_Kind, list[BufferPlan]] = {}
    for buffer in buffers:
        kinds.setdefault((buffer.dtypes.main, buffer.trainable), []).append(buffer)
    return kinds
