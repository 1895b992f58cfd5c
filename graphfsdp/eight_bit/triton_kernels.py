"""The Triton kernels of ``cast``; import this module only where Triton is wanted.

Each program takes up to BLOCK_NUMEL values of one row. Shapes: T = stretches, P = programs.

Note [e4m3 in integers]
Numbers are rounded by integer arithmetic, so that they are the same on every GPU, also on those
without instructions for them, and in Triton's interpreter, whose own conversion rounds otherwise.

Note [Exponents as torch has them]
Tensor code, and torchao, round ``log2(ratio)`` up in float32. Where a ratio is a few units in the
last place above 2^k, its log2 rounds to k itself, and the exponent is k and not k + 1. So here: k
plus what log2 adds, to first order, which is all there is of it where it decides.
"""

# mypy: ignore-errors
# ruff: noqa: N803 - compile-time arguments are in capitals
# Triton compiles this source itself: its arguments have no Python types.

import triton
import triton.language as tl


@triton.jit
def _stretch(stretches_ptr, owners_ptr, BLOCK_NUMEL: tl.constexpr):
    """Return this program's stretch, and the row in it and first value of it."""
    program = tl.program_id(0)
    stretch = stretches_ptr + tl.load(owners_ptr + program).to(tl.int64) * 5
    # In 32 bits as long as they suffice: a division of 64 takes several times as long.
    num_parts = ((tl.load(stretch + 2) + BLOCK_NUMEL - 1) // BLOCK_NUMEL).to(tl.int32)
    program -= tl.load(stretch + 4).to(tl.int32)
    return stretch, program // num_parts, (program % num_parts).to(tl.int64) * BLOCK_NUMEL


@triton.jit
def _values(stretch, row, start, columns, SOURCE_DTYPE: tl.constexpr, BORDER: tl.constexpr):
    """Return float32 values of a row, 0 behind its end, and which of them are before it."""
    length = tl.load(stretch + 2)
    source = tl.load(stretch).to(tl.pointer_type(SOURCE_DTYPE)) + row * length + start
    if BORDER > 1:
        length = tl.multiple_of(length, 16)
        source = tl.multiple_of(source, 16)
    mask = start + columns < length
    values = tl.load(source + columns, mask=mask, other=0.0)
    if tl.int16 == SOURCE_DTYPE:  # the upper half of a float32
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True), mask
    return values.to(tl.float32), mask


@triton.jit
def _target(stretch, row, start, row_bytes, BORDER: tl.constexpr):
    target = tl.load(stretch + 1).to(tl.pointer_type(tl.uint8)) + row * row_bytes + start
    return tl.multiple_of(target, BORDER)


@triton.jit
def _sizes(values):
    """Return magnitudes as integers, which are in the same order, and NaN above all."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _e4m3(values):
    """Round to nearest even, saturated; see Note [e4m3 in integers]."""
    sizes = _sizes(values)
    # 20 bits of the mantissa go; the exponent's bias falls from 127 to 7.
    normal = ((sizes + 0x7FFFF + ((sizes >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, in units of 2^-9: what a float32 of 2^14 is rounded to.
    small = (sizes.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    numbers = tl.minimum(tl.where(sizes < 0x3C800000, small, normal), 0x7E)
    numbers = tl.where(sizes > 0x7F800000, 0x7F, numbers)
    return (numbers | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _exponents(ratios):
    """Return log2, rounded up, plus 127; see Note [Exponents as torch has them]."""
    bits = ratios.to(tl.int32, bitcast=True)
    exponents = bits >> 23
    # Units of 2^-23 above a power of two; below the smallest normal number that is 2^-127.
    above = tl.where(exponents > 0, bits & 0x7FFFFF, (bits - 0x400000) * 2)
    power = (exponents - 127).to(tl.float32)
    log2 = power + above.to(tl.float32) * 1.7197929e-07  # 2^-23 / ln 2
    exponents += (log2 > power).to(tl.int32)
    exponents = tl.where(bits == 0x7F800000, 254, exponents)
    return tl.where(bits > 0x7F800000, 255, exponents)


@triton.jit
def amax_kernel(
    stretches_ptr,  # [T, 5] int64, see cast.STRETCH_COLUMNS
    owners_ptr,  # [P] int32
    amax_ptr,  # [A] int32, bits of float32, to which the largest magnitudes are added
    SOURCE_DTYPE: tl.constexpr,
    BORDER: tl.constexpr,
    BLOCK_NUMEL: tl.constexpr,
):
    """Read a part of one row. Capture: addresses come from the table, which must stay as it is."""
    stretch, row, start = _stretch(stretches_ptr, owners_ptr, BLOCK_NUMEL)
    columns = tl.arange(0, BLOCK_NUMEL)
    values, _ = _values(stretch, row, start, columns, SOURCE_DTYPE, BORDER)
    tl.atomic_max(amax_ptr + tl.load(stretch + 3) + row, tl.max(_sizes(values), 0))


@triton.jit
def float8_kernel(
    stretches_ptr,  # [T, 5] int64
    owners_ptr,  # [P] int32
    scales_ptr,  # [A] float32
    SOURCE_DTYPE: tl.constexpr,
    BORDER: tl.constexpr,
    BLOCK_NUMEL: tl.constexpr,
):
    """Cast a part of one row. Capture: as amax_kernel."""
    stretch, row, start = _stretch(stretches_ptr, owners_ptr, BLOCK_NUMEL)
    columns = tl.arange(0, BLOCK_NUMEL)
    values, mask = _values(stretch, row, start, columns, SOURCE_DTYPE, BORDER)
    scale = tl.load(scales_ptr + tl.load(stretch + 3) + row)
    target = _target(stretch, row, start, tl.load(stretch + 2), BORDER)
    tl.store(target + columns, _e4m3(values * scale), mask=mask)


@triton.jit
def mxfp8_kernel(
    stretches_ptr,  # [T, 5] int64
    owners_ptr,  # [P] int32
    SOURCE_DTYPE: tl.constexpr,
    BORDER: tl.constexpr,
    BLOCK_NUMEL: tl.constexpr,
):
    """Cast a part of one row, scales of 32 values behind its numbers. Capture: as amax_kernel."""
    stretch, row, start = _stretch(stretches_ptr, owners_ptr, BLOCK_NUMEL)
    length = tl.load(stretch + 2)
    blocks = tl.arange(0, BLOCK_NUMEL // 32)
    columns = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
    values, mask = _values(stretch, row, start, columns, SOURCE_DTYPE, BORDER)
    amax = tl.max(_sizes(values), 1).to(tl.float32, bitcast=True)
    exponents = _exponents(tl.div_rn(amax, 448.0))
    # 2^(127 - exponent), of which the smallest is no normal number; 1 for zeros.
    factors = tl.where(exponents == 254, 0x400000, (254 - exponents) << 23)
    factors = tl.where(exponents == 0, 1.0, factors.to(tl.float32, bitcast=True))
    factors = tl.where(exponents == 255, amax, factors)
    row_bytes = length + length // 32
    numbers = _target(stretch, row, start, row_bytes, BORDER)
    tl.store(numbers + columns, _e4m3(values * factors[:, None]), mask=mask)
    scales = tl.load(stretch + 1).to(tl.pointer_type(tl.uint8)) + row * row_bytes + length
    first = start // 32
    tl.store(scales + first + blocks, exponents.to(tl.uint8), mask=first + blocks < length // 32)
