"""A rectangular part of a named whole tensor: what one rank saves, or loads into.

torch.distributed.checkpoint works with these as with tensors, through ``planner.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a tensor.

    Attributes:
        local: The elements; loading writes into them. [...] like ``whole_shape``, but fewer.
        offsets: Where it starts in the whole tensor, per dimension.
        whole_shape: Shape of the whole tensor.
    """

    local: Tensor
    offsets: tuple[int, ...]
    whole_shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.local.dtype

    def with_local(self, local: Tensor) -> "Part":
        """Return the same part with other elements, which may have another dtype."""
        return Part(local, self.offsets, self.whole_shape)


# Key of a tensor in the checkpoint, and what this rank has of it.
NamedPart = tuple[str, Part]


def whole(tensor: Tensor) -> Part:
    """Return a plain tensor as a part: it has everything."""
    return Part(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))


def part_of(tensor: Tensor, offsets: tuple[int, ...] | None = None) -> Part:
    """Return what this rank holds of a tensor.

    Args:
        tensor: Plain or a DTensor.
        offsets: Of a DTensor whose rows are cut unevenly, where the part here begins along each
            dim, or along as many as it has; None for a DTensor that is cut as torch does it.
    """
    if not is_dtensor(tensor):
        return whole(tensor)
    local = local_part(tensor)
    shape = tuple(tensor.shape)
    if offsets is None:
        return Part(local, _regular_offsets(tensor), shape)
    known = offsets[: len(shape)]
    return Part(local, (*known, *[0] * (len(shape) - len(known))), shape)


def _regular_offsets(tensor: Any) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: Sequence[int]
    _, found = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(found)
