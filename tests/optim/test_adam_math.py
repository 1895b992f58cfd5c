"""The update rule as tensor code, against float64 and against torch's own Adam."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphfsdp.optim.fused.settings import Flags
from graphfsdp.optim.fused.storage import StepTensors, make_columns
from graphfsdp.optim.fused.update import adam_coefficients, adam_update_

LOW_PRECISION = [torch.bfloat16, torch.float16]


def _row(
    lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-8, wd: float = 0.1
) -> Tensor:
    return torch.tensor([lr, *betas, eps, wd], dtype=torch.float64)


def _reference(
    param: np.ndarray[tuple[int], np.dtype[np.float64]],
    grads: list[np.ndarray[tuple[int], np.dtype[np.float64]]],
    row: list[float],
    *,
    adam_w_mode: bool,
    bias_correction: bool,
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Adam as in the papers, in float64, one line per line of the algorithm."""
    lr, beta1, beta2, eps, weight_decay = row
    first, second = np.zeros_like(param), np.zeros_like(param)
    for step, grad in enumerate(grads, start=1):
        if not adam_w_mode:
            grad = grad + weight_decay * param
        first = beta1 * first + (1 - beta1) * grad
        second = beta2 * second + (1 - beta2) * grad**2
        first_hat = first / (1 - beta1**step) if bias_correction else first
        second_hat = second / (1 - beta2**step) if bias_correction else second
        decay = weight_decay * param if adam_w_mode else 0.0
        param = param - lr * (first_hat / (np.sqrt(second_hat) + eps) + decay)
    return param


def _run(
    param: Tensor,
    grads: list[Tensor],
    row: Tensor,
    *,
    adam_w_mode: bool,
    bias_correction: bool = True,
    main: Tensor | None = None,
    grad_scale: Tensor | None = None,
    moment_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(param.dtype, torch.float32)
    exp_avg = torch.zeros_like(param, dtype=moment_dtype or wide)
    exp_avg_sq = torch.zeros_like(exp_avg)
    step = torch.zeros((), device=param.device)
    for grad in grads:
        step += 1
        adam_update_(
            make_columns([StepTensors(param, grad, exp_avg, exp_avg_sq, main_param=main)]),
            adam_coefficients(row, step, Flags(bias_correction=bias_correction)),
            Flags(adam_w_mode, bias_correction),
            grad_scale=grad_scale,
        )
    return exp_avg, exp_avg_sq


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_update_equals_the_algorithm_in_float64(
    device: torch.device, adam_w_mode: bool, bias_correction: bool
) -> None:
    param = torch.randn(50, dtype=torch.float64, device=device)
    grads = [torch.randn_like(param) for _ in range(30)]
    expected = _reference(
        param.cpu().numpy(),
        [grad.cpu().numpy() for grad in grads],
        _row().tolist(),
        adam_w_mode=adam_w_mode,
        bias_correction=bias_correction,
    )
    _run(
        param,
        grads,
        _row().to(device),
        adam_w_mode=adam_w_mode,
        bias_correction=bias_correction,
    )
    # A few roundings per step, 30 steps.
    torch.testing.assert_close(
        param.cpu(), torch.from_numpy(expected), rtol=0, atol=30 * 16 * 2.0**-52
    )


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_a_thousand_steps_stay_with_torch(device: torch.device, adam_w_mode: bool) -> None:
    start = 0.02 * torch.randn(2000, device=device)
    param = start.clone()
    other = torch.nn.Parameter(start.clone())
    make = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer = make([other], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    grads = [1e-3 * torch.randn_like(param) for _ in range(1000)]
    exp_avg, exp_avg_sq = _run(
        param, grads, _row(1e-3, (0.9, 0.999)).to(device), adam_w_mode=adam_w_mode
    )
    for grad in grads:
        other.grad = grad
        optimizer.step()
    state = optimizer.state[other]
    # Measured pairs of Adam implementations differ by 3e-7 in the weight after 1000 steps; their
    # second moments by up to 1.3e-5, since 1 - 0.999 rounds differently in float32.
    torch.testing.assert_close(param, other.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_main_weight_steps_in_float32_and_the_model_weight_is_its_rounding(
    device: torch.device, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    param = torch.randn(100, device=device).to(dtype)
    main, plain = param.float(), param.float()
    grads = [torch.randn(100, device=device).to(grad_dtype) for _ in range(10)]
    row = _row().to(device)
    _run(param, grads, row, adam_w_mode=True, main=main)
    _run(plain, [grad.float() for grad in grads], row, adam_w_mode=True)
    assert torch.equal(main, plain)
    assert torch.equal(param, main.to(dtype))


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_maths_is_float32_when_everything_is_stored_narrow(
    device: torch.device, dtype: torch.dtype
) -> None:
    param = torch.randn(100, device=device).to(dtype)
    wide = param.float()
    grad = torch.randn(100, device=device).to(dtype)
    row = _row().to(device)
    exp_avg, exp_avg_sq = _run(param, [grad], row, adam_w_mode=True, moment_dtype=dtype)
    wide_avg, wide_avg_sq = _run(wide, [grad.float()], row, adam_w_mode=True)
    assert torch.equal(param, wide.to(dtype))
    assert torch.equal(exp_avg, wide_avg.to(dtype))
    assert torch.equal(exp_avg_sq, wide_avg_sq.to(dtype))


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_grad_scale_multiplies_and_leaves_the_gradient_alone(
    device: torch.device, adam_w_mode: bool
) -> None:
    grad = torch.randn(20, device=device)
    before = grad.clone()
    scaled, plain = torch.ones(20, device=device), torch.ones(20, device=device)
    row = _row().to(device)
    scale = torch.tensor(0.25, device=device)
    _run(scaled, [grad], row, adam_w_mode=adam_w_mode, grad_scale=scale)
    assert torch.equal(grad, before)
    _run(plain, [0.25 * grad], row, adam_w_mode=adam_w_mode)
    assert torch.equal(scaled, plain)


def test_table_and_step_are_read_when_the_code_runs(device: torch.device) -> None:
    row = _row().to(device)
    step = torch.ones((), device=device)
    before = adam_coefficients(row, step, Flags())
    row[0] = 0.5
    step += 1
    after = adam_coefficients(row, step, Flags())
    assert before.step_size.item() == pytest.approx(1e-2 / (1 - 0.9))
    assert after.step_size.item() == pytest.approx(0.5 / (1 - 0.9**2))


def test_strided_tensors_with_gaps_are_updated_in_place(device: torch.device) -> None:
    storage = torch.randn(6, 8, device=device)
    before = storage.clone()
    grad = torch.randn(3, 8, device=device)
    expected = storage[::2].clone()
    _run(expected, [grad], _row().to(device), adam_w_mode=True)
    _run(storage[::2], [grad], _row().to(device), adam_w_mode=True)
    assert torch.equal(storage[::2], expected)
    assert torch.equal(storage[1::2], before[1::2])


@given(
    lr=st.floats(0, 1),
    beta1=st.floats(0, 0.999),
    beta2=st.floats(0, 0.9999),
    step=st.integers(1, 10**6),
)
def test_coefficients_have_the_accuracy_of_float64(
    lr: float, beta1: float, beta2: float, step: int
) -> None:
    found = adam_coefficients(_row(lr, (beta1, beta2)), torch.tensor(float(step)), Flags())
    correction1 = -math.expm1(step * math.log(beta1)) if beta1 else 1.0
    correction2 = -math.expm1(step * math.log(beta2)) if beta2 else 1.0
    # 1 - beta**step cancels: 1e-16 of one is this much of a small difference.
    assert found.step_size.item() == pytest.approx(
        lr / correction1, rel=1e-15 / correction1 + 1e-13
    )
    assert found.root_correction2.item() == pytest.approx(
        math.sqrt(correction2), rel=1e-15 / correction2 + 1e-13
    )
