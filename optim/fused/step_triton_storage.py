"""How the Triton kernels read and write moments and weights in any storage dtype.

Import this module only where Triton is wanted.
"""

# mypy: ignore-errors
# ruff: noqa: N803 - compile-time arguments are in capitals
# Triton compiles this source itself: its arguments have no Python types.

import triton
import triton.language as tl


@triton.jit
def _decode_e4m3(code):  # [...] uint8, no NaN
    bits = code.to(tl.int32)
    magnitude = bits & 0x7F
    # Below 2**-6 the code counts steps of 2**-9; above, it is a float with another bias.
    small = magnitude.to(tl.float32) * 0.001953125
    large = ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, small, large)
    return tl.where(bits >= 128, -value, value)


@triton.jit
def _encode_e4m3(value):  # [...] float32, of a magnitude that rounds to at most 448
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Half to even, at the 20th bit.
    large = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # The unit in the last place of 2**14 is 2**-9, so the addition rounds.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, large)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def load_moment(ptr, scale_ptr, offsets, mask, blocks, blocks_mask, TOP: tl.constexpr):
    """Return a moment in float32; with scales it is [blocks, elements of a block]."""
    stored = tl.load(ptr + offsets, mask=mask)
    value = _decode_e4m3(stored) if stored.dtype == tl.uint8 else stored.to(tl.float32)
    if TOP > 0:
        value = value * tl.load(scale_ptr + blocks, mask=blocks_mask)[:, None]
    return value


@triton.jit
def store_moment(
    ptr,
    scale_ptr,
    value,
    offsets,
    mask,
    blocks,
    blocks_mask,
    TOP: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Store a moment, with new scales where it has some; see Note [Scaled moments]."""
    if TOP > 0:
        magnitude = tl.where(value == value, tl.abs(value), float("inf"))
        if mask is not None:
            magnitude = tl.where(mask, magnitude, 0.0)
        scale = tl.maximum(tl.div_rn(tl.max(magnitude, axis=1), TOP), 1.1754943508222875e-38)
        tl.store(scale_ptr + blocks, scale, mask=blocks_mask)
        scaled = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
        scaled = tl.where(scaled == scaled, scaled, 0.0)
        if SMALLEST > 0:
            scaled = tl.where(value > 0, tl.maximum(scaled, SMALLEST), scaled)
        value = scaled
    if ptr.dtype.element_ty == tl.uint8:
        tl.store(ptr + offsets, _encode_e4m3(value), mask=mask)
    else:
        tl.store(ptr + offsets, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_weight(param_ptr, main_ptr, offsets, mask, HAS_MAIN: tl.constexpr, HALVES: tl.constexpr):
    """Return the weight that is updated in float32."""
    if HALVES:
        # See Note [Remainders].
        high = tl.load(param_ptr + offsets, mask=mask).to(tl.int32)
        low = tl.load(main_ptr + offsets, mask=mask).to(tl.int32)
        return ((high << 16) + low).to(tl.float32, bitcast=True)
    elif HAS_MAIN:
        return tl.load(main_ptr + offsets, mask=mask).to(tl.float32)
    else:
        return tl.load(param_ptr + offsets, mask=mask).to(tl.float32)


@triton.jit
def store_weight(
    param_ptr, main_ptr, weight, offsets, mask, HAS_MAIN: tl.constexpr, HALVES: tl.constexpr
):
    """Store the main weight, and the model weight rounded from it."""
    if HALVES:
        bits = weight.to(tl.int32, bitcast=True)
        low = (bits << 16) >> 16
        tl.store(main_ptr + offsets, low.to(tl.int16), mask=mask)
        tl.store(param_ptr + offsets, ((bits - low) >> 16).to(tl.int16), mask=mask)
    else:
        if HAS_MAIN:
            tl.store(main_ptr + offsets, weight, mask=mask)
        tl.store(param_ptr + offsets, weight.to(param_ptr.dtype.element_ty), mask=mask)
