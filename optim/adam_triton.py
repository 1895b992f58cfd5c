"""The Triton kernels of FusedAdam; import this module only where Triton is wanted.

Shapes: R = flat runs, B = blocks of all runs, L = lanes, G = groups.
"""

# mypy: ignore-errors
# Triton compiles this source itself: its arguments have no Python types.

import triton
import triton.language as tl


@triton.jit
def coefficients_kernel(
    lanes_ptr,  # [L, 2] int64, address of a float32 step count; row of the table
    hyper_ptr,  # [G, 5] float64, lr, beta1, beta2, eps, weight_decay
    coefficients_ptr,  # [L, 8] float32, written
    ADAM_W_MODE: tl.constexpr,  # noqa: N803 - compile-time arguments are in capitals
    BIAS_CORRECTION: tl.constexpr,  # noqa: N803
):
    """Compute one lane's scalars in float64, one program per lane.

    Capture: reads the step counts and the table that a replay finds.
    """
    lane = tl.program_id(0)
    step_ptr = tl.load(lanes_ptr + lane * 2).to(tl.pointer_type(tl.float32))
    hyper = hyper_ptr + tl.load(lanes_ptr + lane * 2 + 1) * 5
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
    decay = correction1 * 0.0 + 1.0
    if ADAM_W_MODE:
        decay = 1.0 - lr * weight_decay
    out = coefficients_ptr + lane * 8
    tl.store(out, decay.to(tl.float32))
    tl.store(out + 1, weight_decay.to(tl.float32))
    tl.store(out + 2, (1.0 - beta1).to(tl.float32))
    tl.store(out + 3, beta2.to(tl.float32))
    tl.store(out + 4, (1.0 - beta2).to(tl.float32))
    tl.store(out + 5, (lr / correction1).to(tl.float32))
    tl.store(out + 6, tl.sqrt(correction2).to(tl.float32))
    tl.store(out + 7, tl.load(hyper + 3).to(tl.float32))


@triton.jit
def _update_block(
    offsets,
    numel,
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    main_ptr,
    coefficients_ptr,
    scale_ptr,
    MASKED: tl.constexpr,  # noqa: N803
    PARAM_DTYPE: tl.constexpr,  # noqa: N803
    MOMENT_DTYPE: tl.constexpr,  # noqa: N803
    MAIN_DTYPE: tl.constexpr,  # noqa: N803
    HAS_MAIN: tl.constexpr,  # noqa: N803
    HAS_SCALE: tl.constexpr,  # noqa: N803
    ADAM_W_MODE: tl.constexpr,  # noqa: N803
):
    decay = tl.load(coefficients_ptr)
    weight_decay = tl.load(coefficients_ptr + 1)
    one_minus_beta1 = tl.load(coefficients_ptr + 2)
    beta2 = tl.load(coefficients_ptr + 3)
    one_minus_beta2 = tl.load(coefficients_ptr + 4)
    step_size = tl.load(coefficients_ptr + 5)
    root_correction2 = tl.load(coefficients_ptr + 6)
    eps = tl.load(coefficients_ptr + 7)

    # A full block needs no mask, and only without one can loads be 16 bytes wide.
    mask = None
    if MASKED:
        mask = offsets < numel
    grad = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask).to(tl.float32)
    if HAS_MAIN:
        weight = tl.load(main_ptr + offsets, mask=mask).to(tl.float32)
    else:
        weight = tl.load(param_ptr + offsets, mask=mask).to(tl.float32)

    if HAS_SCALE:
        grad = grad * tl.load(scale_ptr)
    if ADAM_W_MODE:
        weight = weight * decay
    else:
        grad = grad + weight * weight_decay
    exp_avg = exp_avg + (grad - exp_avg) * one_minus_beta1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * one_minus_beta2
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), root_correction2) + eps
    weight = weight - tl.div_rn(exp_avg, denominator) * step_size

    tl.store(exp_avg_ptr + offsets, exp_avg.to(MOMENT_DTYPE), mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq.to(MOMENT_DTYPE), mask=mask)
    if HAS_MAIN:
        tl.store(main_ptr + offsets, weight.to(MAIN_DTYPE), mask=mask)
    tl.store(param_ptr + offsets, weight.to(PARAM_DTYPE), mask=mask)


@triton.jit
def update_kernel(
    runs_ptr,  # [R, 8] int64, five addresses, numel, lane, first block
    block_to_run_ptr,  # [B] int32
    coefficients_ptr,  # [L, 8] float32
    scale_ptr,  # [] float32, multiplies every gradient; not read without HAS_SCALE
    PARAM_DTYPE: tl.constexpr,  # noqa: N803
    GRAD_DTYPE: tl.constexpr,  # noqa: N803
    MOMENT_DTYPE: tl.constexpr,  # noqa: N803
    MAIN_DTYPE: tl.constexpr,  # noqa: N803
    HAS_MAIN: tl.constexpr,  # noqa: N803
    HAS_SCALE: tl.constexpr,  # noqa: N803
    ADAM_W_MODE: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
    BLOCK_NUMEL: tl.constexpr,  # noqa: N803
):
    """Update one block of one run: one read and one write of everything, no gradient write.

    Capture: addresses come from the run table, so the table must stay as it is.
    """
    block = tl.program_id(0)
    run = runs_ptr + tl.load(block_to_run_ptr + block).to(tl.int64) * 8
    param = tl.load(run)
    grad = tl.load(run + 1)
    exp_avg = tl.load(run + 2)
    exp_avg_sq = tl.load(run + 3)
    main = tl.load(run + 4)
    numel = tl.load(run + 5)
    coefficients = coefficients_ptr + tl.load(run + 6) * 8
    start = (block - tl.load(run + 7)) * BLOCK_NUMEL
    param_ptr = param.to(tl.pointer_type(PARAM_DTYPE))
    grad_ptr = grad.to(tl.pointer_type(GRAD_DTYPE))
    exp_avg_ptr = exp_avg.to(tl.pointer_type(MOMENT_DTYPE))
    exp_avg_sq_ptr = exp_avg_sq.to(tl.pointer_type(MOMENT_DTYPE))
    main_ptr = main.to(tl.pointer_type(MAIN_DTYPE))
    if ALIGNED:
        # On the pointers: the compiler does not carry it over from the integers.
        param_ptr = tl.multiple_of(param_ptr, 16)
        grad_ptr = tl.multiple_of(grad_ptr, 16)
        exp_avg_ptr = tl.multiple_of(exp_avg_ptr, 16)
        exp_avg_sq_ptr = tl.multiple_of(exp_avg_sq_ptr, 16)
        main_ptr = tl.multiple_of(main_ptr, 16)
    offsets = start + tl.arange(0, BLOCK_NUMEL)
    if start + BLOCK_NUMEL <= numel:
        _update_block(
            offsets, numel, param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, main_ptr,
            coefficients, scale_ptr, False,
            PARAM_DTYPE, MOMENT_DTYPE, MAIN_DTYPE, HAS_MAIN, HAS_SCALE, ADAM_W_MODE,
        )  # fmt: skip
    else:
        _update_block(
            offsets, numel, param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, main_ptr,
            coefficients, scale_ptr, True,
            PARAM_DTYPE, MOMENT_DTYPE, MAIN_DTYPE, HAS_MAIN, HAS_SCALE, ADAM_W_MODE,
        )  # fmt: skip
