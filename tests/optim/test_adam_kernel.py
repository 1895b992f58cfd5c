"""The Triton kernels: interpreted on the CPU, compiled for sm_90, and on a GPU; their numbers."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adam_helpers import (
    DTYPES,
    as_on_cuda,
    by_kernels,
    by_tensor_code,
    make_params,
    set_grads,
)
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused import kernel as step_kernel
from graphfsdp.optim.fused.settings import Flags
from graphfsdp.optim.fused.update import Dtypes
from triton_helpers import (
    compile_for_sm_90,
    fresh_kernels,
    needs_triton,
    resources,
)

FP32, BF16 = torch.float32, torch.bfloat16
SIZES = (1, 0, 2048, 9, 2049, 4096 + 77)
GAP_NUMEL = 16
EXTREMES = [0.0, -0.0, 1e-20, 1e-38, -1e-45, 1e18, -3e38, np.inf, -np.inf, np.nan]
NUM_EXTREMES = 8
MOMENT_DTYPES = st.sampled_from([FP32, BF16])
SETTINGS = st.fixed_dictionaries(
    {
        **dict.fromkeys(("amsgrad", "adam_w_mode", "bias_correction", "maximize"), st.booleans()),
        **{"exp_avg_dtype": MOMENT_DTYPES, "exp_avg_sq_dtype": MOMENT_DTYPES},
        "master_weights": st.booleans(),
    }
)


class Case:
    """Weights with gaps between them, steps behind them, and the gradients of the next step."""

    def __init__(self, dtype: torch.dtype, grad_dtype: torch.dtype, device: str = "cpu") -> None:
        self.device = device
        self.weights = [torch.randn(size, device=device).to(dtype) for size in SIZES]
        self.grads = [
            [torch.randn(size, device=device).to(grad_dtype) for size in SIZES] for _ in range(3)
        ]

    def after_a_step(
        self,
        path: AbstractContextManager[object],
        made: dict[str, Any],
        *,
        offset: int = 0,  # of each weight, in elements, from a border of 16 bytes
        scale: float | None = None,
        skip: float | None = None,
    ) -> dict[str, Tensor]:
        """Return weights and state after a step on that path; the steps before were the device's.

        Whatever lies between the weights must be as it was.
        """
        starts, end = [], GAP_NUMEL
        for weight in self.weights:
            starts.append(end + offset)
            end += -(-weight.numel() // GAP_NUMEL) * GAP_NUMEL + 2 * GAP_NUMEL
        memory = torch.full((end,), 7.0, device=self.device).to(self.weights[0].dtype)
        is_gap = torch.ones_like(memory, dtype=torch.bool)
        params = []
        for start, weight in zip(starts, self.weights, strict=True):
            place = slice(start, start + weight.numel())
            memory[place], is_gap[place] = weight, False
            params.append(nn.Parameter(memory[place]))
        groups: list[dict[str, Any]] = [
            {"params": params[:2], "lr": 1e-2, "weight_decay": 0.1},
            {"params": params[2:4], "lr": 0.3, "betas": (0.0, 0.5), "eps": 1e-3},
            {"params": params[4:], "betas": (0.8, 0.95), "eps": 1e-12, "weight_decay": 1.0},
        ]
        optimizer = FusedAdam(groups, use_decoupled_grad=True, **made)
        *before, last = self.grads
        for grads in before:
            for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
                # Its count stays behind; and with it back, the last step is planned anew.
                is_late = grads is before[-1] and index == 3
                param.decoupled_grad = None if is_late else grad  # type: ignore[attr-defined]
            optimizer.step()
        for param, grad in zip(params, last, strict=True):
            param.decoupled_grad = grad  # type: ignore[attr-defined]
        given: dict[str, Any] = {
            name: torch.tensor(value, device=self.device)
            for name, value in (("grad_scale", scale), ("found_inf", skip))
            if value is not None
        }
        with path:
            optimizer.step(**given)
        assert bool((memory[is_gap] == 7.0).all())
        found = {f"weight {index}": param.detach() for index, param in enumerate(params)}
        for index, param in enumerate(params):
            state = optimizer.state[param].items()
            found |= {f"{key} of {index}": tensor.clone() for key, tensor in state}
        return found


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], rtol: float) -> None:
    """Compare, bit for bit with 0, but for bfloat16: Triton's interpreter cuts where GPUs round."""
    for name, tensor in right.items():
        is_rounded = tensor.dtype == BF16 or (rtol and tensor.dtype == torch.float16)
        close = max(rtol, torch.finfo(tensor.dtype).eps) if is_rounded else rtol
        atol = close if rtol else 1e-30
        torch.testing.assert_close(
            left[name], tensor, rtol=close, atol=atol, equal_nan=True, msg=name
        )


@needs_triton
@settings(max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    grad_dtype=st.sampled_from(DTYPES),
    made=SETTINGS,
    offset=st.sampled_from([0, 1]),
    scale=st.sampled_from([None, 0.37]),
    skip=st.sampled_from([None, 0.0, 1.0]),
)
def test_interpreted_kernels_equal_the_tensor_code_bit_for_bit_and_torchs_nearly(
    dtype: torch.dtype, grad_dtype: torch.dtype, made: dict[str, Any], **step: Any
) -> None:
    case = Case(dtype, grad_dtype)
    by_code = case.after_a_step(by_tensor_code(), made, **step)
    assert_close(case.after_a_step(by_kernels(), made, **step), by_code, rtol=0)
    assert_close(case.after_a_step(nullcontext(), made, **step), by_code, rtol=1e-5)


@needs_triton
@settings(max_examples=60)
@given(
    weights=st.lists(st.sampled_from(EXTREMES), min_size=NUM_EXTREMES, max_size=NUM_EXTREMES),
    grads=st.lists(st.sampled_from(EXTREMES), min_size=NUM_EXTREMES, max_size=NUM_EXTREMES),
    amsgrad=st.booleans(),
    adam_w_mode=st.booleans(),
)
def test_kernels_equal_the_tensor_code_bit_for_bit_whatever_the_values(
    weights: list[float], grads: list[float], **made: Any
) -> None:
    case = Case(FP32, FP32)
    case.weights[3] = torch.tensor([*weights, 1.0])
    case.grads[-1][3] = torch.tensor([*grads, 1.0])
    by_code = case.after_a_step(by_tensor_code(), made)
    assert_close(case.after_a_step(by_kernels(), made), by_code, rtol=0)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("master_weights", [True, False])
def test_kernel_on_the_gpu_equals_the_tensor_code(
    dtype: torch.dtype, grad_dtype: torch.dtype, master_weights: bool
) -> None:
    """A GPU may round a sum of ten operations otherwise."""
    case, made = Case(dtype, grad_dtype, "cuda"), {"master_weights": master_weights}
    by_code = case.after_a_step(by_tensor_code(), made, scale=0.37)
    assert_close(case.after_a_step(nullcontext(), made, scale=0.37), by_code, rtol=16 * 2.0**-23)


def test_a_model_of_many_tensors_costs_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = MagicMock()
    monkeypatch.setattr(step_kernel, "_kernels", lambda: kernels)
    params = make_params([(64,)] * 148)
    set_grads(params)
    with as_on_cuda():
        FusedAdam(params).step()
    for launched in (kernels.coefficients_kernel, kernels.update_kernel):
        launched.__getitem__.assert_called_once_with((148,))


COMPILED = (
    Dtypes(FP32, FP32, FP32, FP32, None, None),
    Dtypes(BF16, FP32, FP32, FP32, None, FP32),
    Dtypes(BF16, BF16, BF16, BF16, None, None),
    Dtypes(BF16, FP32, FP32, FP32, FP32, FP32),
)


def dtype_names(dtypes: Dtypes) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None)


@needs_triton
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtypes", COMPILED, ids=dtype_names)
def test_update_kernel_compiles_for_sm_90(dtypes: Dtypes, aligned: bool, tmp_path: Path) -> None:
    kernels = fresh_kernels(step_kernel)
    constants = step_kernel.constants(
        dtypes, Flags(), has_scale=True, has_skip=True, aligned=aligned
    )
    signature = {
        "params_ptr": "*i64",
        "block_to_param_ptr": "*i32",
        "coefficients_ptr": "*fp32",
        "scale_ptr": "*fp32",
        "skip_ptr": "*fp32",
    }
    compiled = compile_for_sm_90(kernels.update_kernel, signature, constants, step_kernel.NUM_WARPS)
    assert ".target sm_90" in compiled["ptx"]
    assert len(compiled["cubin"]) > 0
    # The point of the unmasked branch: whole 16-byte accesses where the addresses allow them.
    assert (".global.v4.b32" in compiled["ptx"]) is aligned
    # Of 65536 registers, for 20 warps at a time and more, which hide the way to memory.
    if aligned:
        num_registers, num_stack_bytes = resources(compiled["cubin"], tmp_path)
        assert num_registers <= 65536 // (20 * 32)
        assert num_stack_bytes <= 16


@needs_triton
def test_coefficients_kernel_compiles_for_sm_90_with_float64_maths() -> None:
    kernels = fresh_kernels(step_kernel)
    signature = {"params_ptr": "*i64", "hyper_ptr": "*fp64", "coefficients_ptr": "*fp32"}
    constants = {"BIAS_CORRECTION": True}
    compiled = compile_for_sm_90(kernels.coefficients_kernel, signature, constants, 1)
    assert ".target sm_90" in compiled["ptx"]
    assert "fma.rn.f64" in compiled["ptx"]  # exp2 and log2 are not rounded to float32 on the way
    assert len(compiled["cubin"]) > 0
