"""Matrix products of 8-bit numbers: y = x @ w.T forward, and its two products backward.

Each operand is quantised along the dimension that is summed over:

                   operands                   summed over   scales of rows or blocks of
    forward        x [M, K]    w [N, K]       K             x, w
    grad of x      g [M, N]    w.T [K, N]     N             g, w.T
    grad of w      g.T [N, M]  x.T [K, M]     M             g.T, x.T

Forward keeps x in 8 bits and no other copy of it; w is used as it was gathered. So backward has
scales that belong to the other dimension:
- tensorwise: there is one scale, which is good for both;
- rowwise: scales of w and x are powers of two. They go into g, exactly, before that is quantised,
  and the numbers are used as they are;
- MXFP8: numbers are quantised again in blocks along the other dimension, exactly but for those
  that come out below the smallest normal number, at 2**-15 of the largest of their block.

Note [Definition]: a product is that of the numbers in float32, times the inverse scales, rounded
once. torch._scaled_mm computes it where it has it: tensorwise on CPUs and on GPUs from Ada on,
rowwise on GPUs from Hopper on, lengths that 16 divides; elsewhere it is written out. MXFP8 is
always written out, as a product of what the numbers stand for in the dtype of the result, which
bfloat16 holds exactly. **None of this has run on a GPU.**
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from graphfsdp.config import GatherFormat
from graphfsdp.eight_bit.formats import (
    BLOCK,
    NUMBER,
    from_mxfp8,
    scales_of,
    to_float8,
    to_mxfp8,
)

_ALIGNED = 16  # lengths that tensor cores take of 8-bit numbers
_TENSORWISE_SINCE = (8, 9)
_ROWWISE_SINCE = (9, 0)


@dataclass(frozen=True)
class Operand:
    """A matrix [R, L] as numbers; ``scale`` is (), [R, 1] or [R, L / 32]."""

    numbers: Tensor
    scale: Tensor
    format: GatherFormat

    @classmethod
    def of(
        cls, values: Tensor, number_format: GatherFormat, number: torch.dtype = NUMBER
    ) -> "Operand":
        """Quantise [R, L] along L. Capture: about ten operators."""
        if number_format is GatherFormat.MXFP8:
            padded = F.pad(values, (0, -values.shape[1] % BLOCK))
            return cls(*to_mxfp8(padded, number), number_format)
        by_rows = number_format is GatherFormat.FLOAT8_ROWWISE
        amax = values.abs().amax(1, keepdim=True) if by_rows else values.abs().amax()
        scale = scales_of(amax, powers_of_two=by_rows, number=number)
        return cls(to_float8(values, scale, number), scale, number_format)

    def transposed(self) -> "Operand":
        """Return [L, R] to be summed over R, without scales of the rows that were."""
        if self.format is GatherFormat.MXFP8:
            values = from_mxfp8(self.numbers, self.scale, torch.float32)
            return Operand.of(values.t(), self.format, self.numbers.dtype)
        if self.format is GatherFormat.FLOAT8:
            return Operand(self.numbers.t(), self.scale, self.format)
        ones = self.scale.new_ones(self.numbers.shape[1], 1)
        return Operand(self.numbers.t(), ones, self.format)


def product(left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
    """Return [R, Q] for [R, L] and [Q, L]. Capture: one operator where torch has it."""
    if left.format is GatherFormat.MXFP8:
        values = [from_mxfp8(each.numbers, each.scale, dtype) for each in (left, right)]
        return values[0] @ values[1].t()
    left_inverse, right_inverse = left.scale.reciprocal(), right.scale.reciprocal().t()
    if not _torch_has(left, right, dtype):
        exact = left.numbers.float() @ right.numbers.float().t()
        return (exact * left_inverse * right_inverse).to(dtype)
    numbers, others = left.numbers, right.numbers
    if not numbers.is_cpu:  # GPUs take rows of the first and columns of the second alone
        numbers, others = numbers.contiguous(), others.contiguous()
    return torch._scaled_mm(
        numbers, others.t(), scale_a=left_inverse, scale_b=right_inverse, out_dtype=dtype
    )


def grad_of_left(
    grad: Tensor | Operand, right: Operand, number: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return [M, K] for grad [M, N], of one scale or in full, and right [N, K]."""
    if isinstance(grad, Operand):
        return product(grad, right.transposed(), dtype)
    if right.format is GatherFormat.FLOAT8_ROWWISE:
        grad = grad.float() * right.scale.reciprocal().t()
    return product(Operand.of(grad, right.format, number), right.transposed(), dtype)


def grad_of_right(
    grad: Tensor | Operand, left: Operand, number: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return [N, K] for grad [M, N], of one scale or in full, and left [M, K]."""
    if isinstance(grad, Operand):
        return product(grad.transposed(), left.transposed(), dtype)
    if left.format is GatherFormat.FLOAT8_ROWWISE:
        grad = grad.float() * left.scale.reciprocal()
    return product(Operand.of(grad.t(), left.format, number), left.transposed(), dtype)


def _torch_has(left: Operand, right: Operand, dtype: torch.dtype) -> bool:
    by_rows = left.format is GatherFormat.FLOAT8_ROWWISE
    if left.numbers.is_cpu:
        return not by_rows
    if any(length % _ALIGNED for length in (*left.numbers.shape[1:], *right.numbers.shape)):
        return False
    if by_rows and dtype is not torch.bfloat16:
        return False
    since = _ROWWISE_SINCE if by_rows else _TENSORWISE_SINCE
    device = left.numbers.device
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= since
