"""The tensors of a fused step, and how weights and moments are stored in fewer bits.

Shapes: [...] any shape, the same for all tensors of one parameter or flat run; S = rows of a
parameter; N = elements of a row; C = blocks of a row, N / 256 rounded up.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.optim.fused.flat_runs import flat_view


class StepTensors(NamedTuple):
    """One parameter's tensors, or one flat run's; all but the gradient are written in place."""

    param: Tensor  # [...] float, model weight
    grad: Tensor  # [...] any float
    exp_avg: Tensor | None = None  # [...] float, first moment or momentum buffer
    exp_avg_sq: Tensor | None = None  # [...] float
    max_exp_avg_sq: Tensor | None = None  # [...] float
    main_param: Tensor | None = None  # [...] float32, or int16 remainders
    exp_avg_scale: Tensor | None = None  # [S, C] float32; None where a moment has no scales
    exp_avg_sq_scale: Tensor | None = None  # [S, C] float32
    max_exp_avg_sq_scale: Tensor | None = None  # [S, C] float32

    @property
    def is_scaled(self) -> bool:
        return self.exp_avg_scale is not None or self.exp_avg_sq_scale is not None


class Columns(NamedTuple):
    """The tensors of many parameters, one list per field of ``StepTensors``; empty for None."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    main_params: list[Tensor]
    exp_avg_scales: list[Tensor]
    exp_avg_sq_scales: list[Tensor]
    max_exp_avg_sq_scales: list[Tensor]

    def part(self, start: int, stop: int) -> "Columns":
        return Columns(*(column[start:stop] for column in self))

    def dtypes(self) -> "Dtypes":
        return Dtypes(*(column[0].dtype if column else None for column in self[:6]))  # type: ignore[arg-type]


class Dtypes(NamedTuple):
    """Storage dtypes of one launch; None where there is no such tensor."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype | None
    exp_avg_sq: torch.dtype | None
    max_exp_avg_sq: torch.dtype | None
    main_param: torch.dtype | None


def make_columns(members: list[StepTensors]) -> Columns:
    columns = zip(*members, strict=True) if members else [()] * len(Columns._fields)
    return Columns(*([tensor for tensor in column if tensor is not None] for column in columns))


# Note [Remainders]
# A float32 main weight in 32 bits: its bits, read as an int32, are param_bits * 65536 + remainder,
# with the remainder in [-32768, 32767]: the bfloat16 model weight is the float32 rounded to the
# nearest, halves away from zero. So the pair is exact, and the model weight alone is a rounded
# weight, no cut one.


def join_remainder(
    param: Tensor,  # [...] bfloat16
    remainder: Tensor,  # [...] int16
) -> Tensor:
    """Return the float32 main weight, [...] float32, newly allocated."""
    bits = param.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainder).view(torch.float32)


def split_remainder_(
    param: Tensor,  # [...] bfloat16, written
    remainder: Tensor,  # [...] int16, written
    main: Tensor,  # [...] float32
) -> None:
    """Store a float32 main weight; see Note [Remainders]."""
    bits = main.view(torch.int32)
    # The low half as a signed number, then the rest, which is a multiple of 65536.
    low = bits.to(torch.int16)
    high = bits.sub(low).bitwise_right_shift_(16)
    param.view(torch.int16).copy_(high)
    remainder.copy_(low)


# Note [Scaled moments]
# Moments in 16 or 8 bits: one float32 scale for each block of a row brings them into range. A row
# is what follows the first dimension, contiguous in memory, and blocks never cross rows. So
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
    return f"{moment}_scale"


def has_scales(dtype: torch.dtype | None) -> TypeGuard[torch.dtype]:
    return dtype in TOPS


def fits_scales(param: Tensor) -> bool:
    """Whether scaled moments are worth it for ``param``; others keep float32 moments.

    Matrices with rows of at least 32 elements, and vectors of more than 65536, such as the flat
    buffers of some training frameworks. Not a vector that is a DTensor: ranks may cut it anywhere.
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
    """Return the moment, [...] float32, newly allocated."""
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
    positive: bool,  # it is a second moment
) -> None:
    """Store a moment; see Note [Scaled moments]."""
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


def read_weights(part: Columns, dtype: torch.dtype) -> list[Tensor]:
    """Return what a step updates, in a wide dtype: the stored tensors where they have it."""
    if part.main_params and part.main_params[0].dtype == torch.int16:
        return list(map(join_remainder, part.params, part.main_params))
    return _widen(part.main_params or part.params, dtype)


def store_weights(part: Columns, weights: list[Tensor]) -> None:
    if part.main_params and part.main_params[0].dtype == torch.int16:
        for param, remainder, weight in zip(part.params, part.main_params, weights, strict=True):
            split_remainder_(param, remainder, weight)
        return
    for stored in (part.main_params, part.params):
        if stored and stored is not weights:
            torch._foreach_copy_(stored, weights)


def read_moments(part: Columns, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return first, second and largest second moments, in a wide dtype; empty where are none."""
    return [
        list(map(dequantize, stored, scales)) if scales else _widen(stored, dtype)
        for stored, scales in _stored_moments(part)
    ]


def store_moments(part: Columns, moments: list[list[Tensor]]) -> None:
    for index, (stored, scales) in enumerate(_stored_moments(part)):
        if scales:
            for codes, scale, moment in zip(stored, scales, moments[index], strict=True):
                quantize_(codes, scale, moment, positive=index > 0)
        elif stored and stored is not moments[index]:
            torch._foreach_copy_(stored, moments[index])


def _stored_moments(part: Columns) -> list[tuple[list[Tensor], list[Tensor]]]:
    return [
        (part.exp_avgs, part.exp_avg_scales),
        (part.exp_avg_sqs, part.exp_avg_sq_scales),
        (part.max_exp_avg_sqs, part.max_exp_avg_sq_scales),
    ]


def _widen(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if not tensors or tensors[0].dtype == dtype:
        return tensors
    return [tensor.to(dtype) for tensor in tensors]


def _per_element(scales: Tensor, row_numel: int) -> Tensor:
    return scales.repeat_interleave(SCALE_BLOCK_NUMEL, dim=1)[:, :row_numel]
