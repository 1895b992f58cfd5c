"""The Triton kernels of FusedAdam; import this module only where Triton is wanted.

Shapes: P = parameters, B = blocks of all parameters, G = groups.
"""

# mypy: ignore-errors
# ruff: noqa: N803 - compile-time arguments are in capitals
# Triton compiles this source itself: its arguments have no Python types.

import triton
import triton.language as tl


@triton.jit
def coefficients_kernel(
    params_ptr,  # [P, 10] int64, see update_kernel
    hyper_ptr,  # [G, 5] float64, lr, beta1, beta2, eps, weight_decay
    coefficients_ptr,  # [P, 8] float32, written
    BIAS_CORRECTION: tl.constexpr,
):
    """A parameter's scalars, in float64. Capture: reads the count and table that a replay finds."""
    index = tl.program_id(0)
    param = params_ptr + index * 10
    step_ptr = tl.load(param + 7).to(tl.pointer_type(tl.float32))
    hyper = hyper_ptr + tl.load(param + 8) * 5
    lr = tl.load(hyper)
    beta1 = tl.load(hyper + 1)
    beta2 = tl.load(hyper + 2)
    weight_decay = tl.load(hyper + 4)
    correction1 = beta1 * 0.0 + 1.0
    correction2 = correction1
    if BIAS_CORRECTION:
        step = tl.load(step_ptr).to(tl.float64)
        # beta**step. The smallest normal number stands for a beta of 0, whose log2 is infinite:
        # any power of it is as good as 0.
        correction1 = 1.0 - tl.exp2(step * tl.log2(tl.maximum(beta1, 2.3e-308)))
        correction2 = 1.0 - tl.exp2(step * tl.log2(tl.maximum(beta2, 2.3e-308)))
    out = coefficients_ptr + index * 8
    tl.store(out, (1.0 - lr * weight_decay).to(tl.float32))
    tl.store(out + 1, weight_decay.to(tl.float32))
    tl.store(out + 2, (1.0 - beta1).to(tl.float32))
    tl.store(out + 3, beta2.to(tl.float32))
    tl.store(out + 4, (1.0 - beta2).to(tl.float32))
    tl.store(out + 5, (lr / correction1).to(tl.float32))
    tl.store(out + 6, tl.sqrt(correction2).to(tl.float32))
    tl.store(out + 7, tl.load(hyper + 3).to(tl.float32))


@triton.jit
def _update_block(
    pointers,
    offsets,
    mask,
    coefficients_ptr,
    scale_ptr,
    HAS_MAIN: tl.constexpr,
    AMSGRAD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ADAM_W_MODE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
):
    """Update some elements; ``mask`` is None where all of them are there."""
    param, grad_ptr, first_ptr, second_ptr, largest_ptr, main = pointers
    grad = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    if HAS_MAIN:
        weight = tl.load(main + offsets, mask=mask).to(tl.float32)
    else:
        weight = tl.load(param + offsets, mask=mask).to(tl.float32)
    first = tl.load(first_ptr + offsets, mask=mask).to(tl.float32)
    second = tl.load(second_ptr + offsets, mask=mask).to(tl.float32)
    if HAS_SCALE:
        grad = grad * tl.load(scale_ptr)
    if MAXIMIZE:
        grad = -grad
    if ADAM_W_MODE:
        weight = weight * tl.load(coefficients_ptr)
    else:
        grad = grad + weight * tl.load(coefficients_ptr + 1)
    first = first + (grad - first) * tl.load(coefficients_ptr + 2)
    second = second * tl.load(coefficients_ptr + 3) + grad * grad * tl.load(coefficients_ptr + 4)
    divisor = second
    if AMSGRAD:
        largest = tl.load(largest_ptr + offsets, mask=mask).to(tl.float32)
        # NaN stays NaN, as in torch.maximum.
        divisor = tl.where((largest >= second) | (largest != largest), largest, second)
        tl.store(largest_ptr + offsets, divisor.to(largest_ptr.dtype.element_ty), mask=mask)
    denominator = tl.div_rn(tl.sqrt_rn(divisor), tl.load(coefficients_ptr + 6))
    denominator = denominator + tl.load(coefficients_ptr + 7)
    weight = weight - tl.div_rn(first, denominator) * tl.load(coefficients_ptr + 5)
    tl.store(first_ptr + offsets, first.to(first_ptr.dtype.element_ty), mask=mask)
    tl.store(second_ptr + offsets, second.to(second_ptr.dtype.element_ty), mask=mask)
    if HAS_MAIN:
        tl.store(main + offsets, weight, mask=mask)
    tl.store(param + offsets, weight.to(param.dtype.element_ty), mask=mask)


@triton.jit
def _load_pointers(
    row,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    FIRST_DTYPE: tl.constexpr,
    SECOND_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    param_ptr = tl.load(row).to(tl.pointer_type(PARAM_DTYPE))
    grad_ptr = tl.load(row + 1).to(tl.pointer_type(GRAD_DTYPE))
    first_ptr = tl.load(row + 2).to(tl.pointer_type(FIRST_DTYPE))
    second_ptr = tl.load(row + 3).to(tl.pointer_type(SECOND_DTYPE))
    largest_ptr = tl.load(row + 4).to(tl.pointer_type(SECOND_DTYPE))
    main_ptr = tl.load(row + 5).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        # On the pointers: the compiler does not carry it over from the integers.
        param_ptr = tl.multiple_of(param_ptr, 16)
        grad_ptr = tl.multiple_of(grad_ptr, 16)
        first_ptr = tl.multiple_of(first_ptr, 16)
        second_ptr = tl.multiple_of(second_ptr, 16)
        largest_ptr = tl.multiple_of(largest_ptr, 16)
        main_ptr = tl.multiple_of(main_ptr, 16)
    return param_ptr, grad_ptr, first_ptr, second_ptr, largest_ptr, main_ptr


@triton.jit
def update_kernel(
    params_ptr,  # [P, 10] int64, six addresses, numel, address of the step count, row, first block
    block_to_param_ptr,  # [B] int32
    coefficients_ptr,  # [P, 8] float32
    scale_ptr,  # [] float32, multiplies every gradient; not read without HAS_SCALE
    skip_ptr,  # [] float32, nothing is changed unless it is zero; not read without HAS_SKIP
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    FIRST_DTYPE: tl.constexpr,
    SECOND_DTYPE: tl.constexpr,
    HAS_MAIN: tl.constexpr,
    AMSGRAD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    ADAM_W_MODE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_NUMEL: tl.constexpr,
    PART_NUMEL: tl.constexpr,
):
    """Update one block of a parameter: one read and one write of everything, no gradient write.

    Capture: addresses come from the table, so the table must stay as it is.
    """
    block = tl.program_id(0)
    index = tl.load(block_to_param_ptr + block).to(tl.int64)
    row = params_ptr + index * 10
    pointers = _load_pointers(row, PARAM_DTYPE, GRAD_DTYPE, FIRST_DTYPE, SECOND_DTYPE, ALIGNED)
    numel = tl.load(row + 6)
    coefficients = coefficients_ptr + index * 8
    block -= tl.load(row + 9)
    if HAS_SKIP:
        # Without elements: every load and store is masked off, so no memory is moved.
        numel = tl.where(tl.load(skip_ptr) == 0.0, numel, 0)
    start = block * BLOCK_NUMEL
    # A full block needs no mask, and only without one can loads be 16 bytes wide.
    if start + BLOCK_NUMEL <= numel:
        offsets = start + tl.arange(0, BLOCK_NUMEL)
        _update_block(
            pointers, offsets, None, coefficients, scale_ptr,
            HAS_MAIN, AMSGRAD, HAS_SCALE, ADAM_W_MODE, MAXIMIZE,
        )  # fmt: skip
    else:
        # In parts: as a whole it would need more registers than all the rest.
        for part in range(BLOCK_NUMEL // PART_NUMEL):
            offsets = start + part * PART_NUMEL + tl.arange(0, PART_NUMEL)
            _update_block(
                pointers, offsets, offsets < numel, coefficients, scale_ptr,
                HAS_MAIN, AMSGRAD, HAS_SCALE, ADAM_W_MODE, MAXIMIZE,
            )  # fmt: skip
