"""Moments in 16 or 8 bits: one float32 scale for each block of a row brings them into range.

Shapes: S = rows of a parameter; N = elements of a row; C = blocks of a row, N / 256 rounded up;
[...] the parameter's shape.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeGuard

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.optim.fused.flat_runs import flat_view

# Note [Scaled moments]
# A row is what follows the first dimension, contiguous in memory, and blocks never cross rows. So
# a parameter that is sharded by rows has the same blocks on any number of ranks: moments are bit
# for bit those of the whole parameter, and a checkpoint can be cut anew at any row. The scale of a
# block is its largest magnitude / the top of the range, so that the largest element is stored to
# full precision and none overflows. Half of float16's range is used, as Transformer Engine does.
#
# A second moment that is not zero is never stored as zero, but as the smallest number above it:
# the update divides by its root, so zero would turn a tiny gradient into a huge step, and too
# large a moment turns it into too small a one.
#
# A NaN or infinity makes the scale infinite, and with that its whole block NaN or infinite.
SCALE_BLOCK_NUMEL = 256
TOPS: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float16: 32752.0, torch.float8_e4m3fn: 448.0}
)
SMALLEST: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}
)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
# The smallest normal float32: below it a scale would lose precision, and could be zero.
SMALLEST_SCALE = 2.0**-126
# Where a scale would cost more than it is worth, and where ranks may cut anywhere.
_MIN_ROW_NUMEL = 32
_MAX_VECTOR_NUMEL = 65536


def scale_of(moment: str) -> str:
    """Return the name of the state with the scales of a moment."""
    return f"{moment}_scale"


def has_scales(dtype: torch.dtype | None) -> TypeGuard[torch.dtype]:
    """Return whether moments of this dtype are stored with scales."""
    return dtype in TOPS


def fits_scales(param: Tensor) -> bool:
    """Return whether scaled moments are worth it for ``param``; others keep float32 moments.

    Matrices with rows of at least 32 elements, and vectors of more than 65536, such as the flat
    buffers of some training frameworks. Not a vector that is a DTensor: ranks may cut it anywhere.

    Args:
        param: [...] the parameter; a DTensor with its whole shape.
    """
    if param.dim() >= 2:
        return math.prod(param.shape[1:]) >= _MIN_ROW_NUMEL
    return not is_dtensor(param) and param.numel() > _MAX_VECTOR_NUMEL


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return number and length of the rows; a vector is one row."""
    if len(shape) >= 2:
        return shape[0], math.prod(shape[1:])
    return 1, math.prod(shape)


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return [S, C] for a parameter's shape."""
    num_rows, row_numel = rows_of(shape)
    return num_rows, -(-row_numel // SCALE_BLOCK_NUMEL)


def by_rows(tensor: Tensor) -> Tensor:
    """Return the view [S, N] of a contiguous tensor."""
    return flat_view(tensor).view(rows_of(tensor.shape))


def dequantize(
    codes: Tensor,  # [...] float16 or float8_e4m3fn, contiguous
    scales: Tensor,  # [S, C] float32
) -> Tensor:
    """Return the moment, [...] float32, newly allocated.

    Capture: no host sync.
    """
    wide = codes.to(torch.float32)
    if wide.numel():
        rows = by_rows(wide)
        rows.mul_(_per_element(scales, rows.shape[1]))
    return wide


def quantize_(
    codes: Tensor,  # [...] float16 or float8_e4m3fn, contiguous, written
    scales: Tensor,  # [S, C] float32, written
    moment: Tensor,  # [...] float32, contiguous
    *,
    positive: bool,
) -> None:
    """Store a moment; see Note [Scaled moments].

    Args:
        positive: It is a second moment.

    Capture: no host sync.
    """
    if not codes.numel():
        return
    rows = by_rows(moment)
    num_blocks = scales.shape[1]
    padding = num_blocks * SCALE_BLOCK_NUMEL - rows.shape[1]
    magnitudes = torch.nn.functional.pad(rows.abs(), (0, padding))
    largest = magnitudes.view(-1, num_blocks, SCALE_BLOCK_NUMEL).amax(dim=-1)
    largest = largest.nan_to_num(nan=math.inf, posinf=math.inf)
    scales.copy_((largest / TOPS[codes.dtype]).clamp_(min=SMALLEST_SCALE))
    scaled = rows / _per_element(scales, rows.shape[1])
    scaled = scaled.nan_to_num_(nan=0.0)
    if positive:
        scaled = torch.where(rows > 0, scaled.clamp(min=SMALLEST[codes.dtype]), scaled)
    by_rows(codes).copy_(scaled)


def _per_element(scales: Tensor, row_numel: int) -> Tensor:
    return scales.repeat_interleave(SCALE_BLOCK_NUMEL, dim=1)[:, :row_numel]
