"""Values as float8 with scales, bit for bit as torchao makes them, NaN and zeros included.

Numbers are e4m3, up to 448.

Float8: one float32 scale for a tensor, or for each row; a number is ``value * scale`` rounded to
nearest even and saturated. The scale is 448 / amax, in float64 and then rounded; of rows it is
rounded down to a power of two, so that scaling and its inverse are exact. An amax of 0 counts as
1e-12. A NaN makes its scale NaN, and so all numbers under it.

MXFP8: one scale for 32 values that follow one another in a row, a power of two in 8 bits (E8M0:
the exponent plus 127; 255 is NaN). It is amax / 448 rounded up to a power of two, so that nothing
saturates (torchao's RCEIL, as NVIDIA's kernels do it).

Sources: torchao 0.18, float8/float8_utils.py (amax_to_scale, to_fp8_saturated) and
prototype/mx_formats/mx_tensor.py (to_mx, to_dtype).
"""

import torch
from torch import Tensor

from graphfsdp.config import GatherFormat

NUMBER = torch.float8_e4m3fn
_LARGEST = torch.finfo(NUMBER).max
BLOCK = 32  # values that share a scale in MXFP8
_EXPONENT = torch.float8_e8m0fnu
_SMALLEST_AMAX = 1e-12
_BIAS = 127  # of exponents in float32 and in E8M0
_NAN = 255
_INFINITE = 254  # what amax / 448 comes to where amax is infinite


def scales_of(amax: Tensor, *, powers_of_two: bool = False) -> Tensor:
    """Return float32 scales for largest magnitudes."""
    amax = amax.to(torch.float64).clamp(min=_SMALLEST_AMAX)
    scale = (_LARGEST / amax).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if powers_of_two else scale


def to_float8(values: Tensor, scale: Tensor) -> Tensor:
    return _saturated(values.to(torch.float32) * scale)


def from_float8(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (numbers.to(dtype) / scale).to(dtype)


def to_mxfp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers [..., K] and, as uint8, exponents [..., K / 32] for values [..., K]."""
    blocks = values.unflatten(-1, (-1, BLOCK)).to(torch.float32)
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = _rounded_up(amax / _LARGEST)
    # A block of nothing but zeros and denormals of float32 stays as it is.
    factor = _power_of_two(exponent).reciprocal().masked_fill(exponent == 0, 1.0)
    return _saturated(blocks * factor).flatten(-2), exponent.squeeze(-1)


def from_mxfp8(numbers: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    blocks: Tensor = numbers.to(dtype).unflatten(-1, (-1, BLOCK))
    return (blocks * _power_of_two(exponents).to(dtype).unsqueeze(-1)).flatten(-2)


def packed_numel(numel: int, number_format: GatherFormat) -> int:
    """Return the bytes of values that are gathered, with the scales that travel with them."""
    return numel + numel // BLOCK if number_format is GatherFormat.MXFP8 else numel


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return float32, exactly, 2^-127 included; NaN for 255."""
    return exponents.view(_EXPONENT).to(torch.float32)


def _saturated(scaled: Tensor) -> Tensor:
    return scaled.clamp(-_LARGEST, _LARGEST).to(NUMBER)


def _rounded_up(ratio: Tensor) -> Tensor:
    power = torch.ceil(torch.log2(ratio)).clamp(-_BIAS, _BIAS) + _BIAS
    power = power.masked_fill(ratio.isinf(), _INFINITE).masked_fill(ratio.isnan(), _NAN)
    return power.to(torch.uint8)
