"""A rectangular part of a named whole tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part

Box = tuple[slice, ...]


def box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple(slice(first, first + n) for first, n in zip(offsets, sizes, strict=True))


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a tensor: its elements, which loading writes, and where they belong."""

    local: Tensor
    offsets: tuple[int, ...]
    whole_shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def box(self) -> Box:
        """Where it lies in the whole tensor."""
        return box(self.offsets, self.local.shape)

    def like(self, local: Tensor) -> "Part":
        """Return the same part with other elements, which may have another dtype."""
        return Part(local, self.offsets, self.whole_shape)


# Key of a tensor in the checkpoint, and what this rank has of it.
NamedPart = tuple[str, Part]


def whole(tensor: Tensor) -> Part:
    return Part(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))


def part_of(tensor: Tensor, like: Tensor | None = None) -> Part:
    """``like`` is a DTensor with the same rows, which knows better where they begin.

    Older versions of torch make DTensors of ours that say that torch has cut them.
    """
    if not is_dtensor(tensor):
        return whole(tensor)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    cut: Any = tensor if like is None else like
    shape = tuple(tensor.shape)
    _, known = compute_local_shape_and_global_offset(cut.shape, cut.device_mesh, cut.placements)
    offsets = (*known, *[0] * len(shape))[: len(shape)]
    return Part(local_part(tensor), offsets, shape)
