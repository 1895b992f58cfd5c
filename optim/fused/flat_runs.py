"""Flat runs: stretches of neighbouring tensors that one kernel can treat as one tensor.

Shapes: [...] any shape; [R] all elements of one run.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# One parameter's tensors: weight, gradient, moments and so on, in a fixed order. None is a tensor
# that does not take part.
Bundle = tuple[Tensor | None, ...]
_Item = TypeVar("_Item")

# Tensors that do not continue their neighbour start on a border of this many elements, which is
# a multiple of 16 bytes in every dtype.
BORDER_NUMEL = 64


class FlatRun(NamedTuple):
    """Neighbouring bundles as one bundle of 1-D views."""

    tensors: Bundle  # one [R] view per column of the bundles, None where the column is None
    members: tuple[int, ...]  # index of each bundle in the list that was merged, in memory order


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """All elements in one stretch, each once; channels-last tensors are, expanded ones are not."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def same_layout(tensor: Tensor, other: Tensor) -> bool:
    """Equal positions in memory are equal indices; strides of dims of size one say nothing."""
    return tensor.shape == other.shape and all(
        a == b
        for a, b, size in zip(tensor.stride(), other.stride(), tensor.shape, strict=True)
        if size != 1
    )


def flat_view(tensor: Tensor, numel: int | None = None) -> Tensor:
    """The 1-D view in memory order; a longer one reaches into neighbours in the same storage."""
    length = tensor.numel() if numel is None else numel
    return tensor.detach().as_strided((length,), (1,), tensor.storage_offset())


def continues(left: Tensor, right: Tensor) -> bool:
    return _Span.of(left).precedes(_Span.of(right))


def slices_like(
    tensors: Sequence[Tensor],
    allocate: Callable[[int], Tensor],  # makes a 1-D buffer of so many elements
) -> list[Tensor]:
    """Tensors shaped and strided like these in one buffer, neighbours where these are in memory."""
    offsets: list[int] = []
    end = 0
    previous: Tensor | None = None
    for tensor in tensors:
        if previous is None or not continues(previous, tensor):
            end = -(-end // BORDER_NUMEL) * BORDER_NUMEL
        offsets.append(end)
        end += tensor.numel()
        previous = tensor
    buffer = allocate(end)
    return [
        buffer.as_strided(tensor.shape, tensor.stride(), offset)
        if is_dense(tensor.shape, tensor.stride())
        else buffer[offset : offset + tensor.numel()].view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def merge_neighbours(bundles: Sequence[Bundle]) -> list[FlatRun]:
    """Merge neighbours in every column into flat runs, in memory order of their first column.

    Two bundles are neighbours where, column by column, the second tensor starts right after the
    first in the same storage, with the same dtype. Bundles of different groups must not be given
    together. Within a bundle all tensors are dense and have the same shape and strides; those of
    zero size are skipped.
    """
    spans = {
        index: [None if tensor is None else _Span.of(tensor) for tensor in bundle]
        for index, bundle in enumerate(bundles)
        if _first(bundle).numel()
    }
    runs: list[list[int]] = []
    for index in sorted(spans, key=lambda i: _first(spans[i])[:2]):
        columns = zip(spans[runs[-1][-1]], spans[index], strict=True) if runs else ()
        if runs and all(
            left is right if left is None or right is None else left.precedes(right)
            for left, right in columns
        ):
            runs[-1].append(index)
        else:
            runs.append([index])
    return [_make_run(bundles, members) for members in runs]


class _Span(NamedTuple):
    """Where a tensor lies."""

    address: int  # of its storage
    start: int
    stop: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Span":
        start = int(tensor.storage_offset())
        address = tensor.untyped_storage().data_ptr()
        return cls(address, start, start + tensor.numel(), tensor.dtype)

    def precedes(self, other: "_Span") -> bool:
        return (self.address, self.dtype, self.stop) == (other.address, other.dtype, other.start)


def _first(column: Sequence[_Item | None]) -> _Item:
    return next(item for item in column if item is not None)


def _make_run(bundles: Sequence[Bundle], members: list[int]) -> FlatRun:
    numel = sum(_first(bundles[index]).numel() for index in members)
    tensors = tuple(
        None if tensor is None else flat_view(tensor, numel) for tensor in bundles[members[0]]
    )
    return FlatRun(tensors, tuple(members))
