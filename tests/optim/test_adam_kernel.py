"""The Triton kernels: interpreted on the CPU, compiled for sm_90, and on a GPU; their numbers."""

import itertools
import math
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adam_helpers import assert_equal, make_twins, set_grads
from adam_kernel_cases import (
    COMBINATIONS,
    FP32,
    MIXED,
    Case,
    assert_kernel_is_tensor_code,
    assert_same,
    dtype_names,
    interpreted,
    interpreter,  # noqa: F401  (a fixture)
    make_case,
    map_tensors,
    pairwise,
)
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused import kernel as step_kernel
from graphfsdp.optim.fused import step as step_module
from graphfsdp.optim.fused.settings import Flags
from graphfsdp.optim.fused.storage import Dtypes
from graphfsdp.optim.fused.update import adam_coefficients
from triton_helpers import compile_for_sm_90, fresh_kernels, needs_triton, resources

VALUES = st.sampled_from(
    [0.0, -0.0, 1.0, -3.0, 1e-20, 1e-38, -1e-45, 1e18, 1e30, -3e38, np.inf, -np.inf, np.nan]
)
NUM_VALUES = 8
ROWS = st.lists(VALUES, min_size=NUM_VALUES, max_size=NUM_VALUES)


@interpreted
@pytest.mark.parametrize("dtypes", pairwise(COMBINATIONS), ids=dtype_names)
def test_interpreted_kernel_equals_the_tensor_code_bit_for_bit(dtypes: Dtypes) -> None:
    assert_kernel_is_tensor_code([1, 0, 2048, 5, 2049, 4096 + 77], dtypes, Flags())


@interpreted
@pytest.mark.parametrize(
    ("amsgrad", "scale"), [(None, None), (torch.float32, 0.5), (torch.bfloat16, None)]
)
def test_interpreted_kernel_knows_every_mode(
    amsgrad: torch.dtype | None, scale: float | None
) -> None:
    base = FP32 if amsgrad else MIXED
    dtypes = base._replace(exp_avg_sq=amsgrad or torch.float32, max_exp_avg_sq=amsgrad)
    for adam_w_mode, bias_correction, maximize in itertools.product([True, False], repeat=3):
        flags = Flags(adam_w_mode, bias_correction, maximize)
        assert_kernel_is_tensor_code([300, 2048, 0, 3], dtypes, flags, scale)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=dtype_names)
def test_kernel_on_the_gpu_equals_the_tensor_code(dtypes: Dtypes) -> None:
    assert_kernel_is_tensor_code([1, 2048, 5, 2049, 70_000], dtypes, Flags(), device="cuda")


@interpreted
def test_parameters_off_a_16_byte_border_are_apart_and_still_right() -> None:
    found = make_case([100, 2100], FP32)
    odd = map_tensors(found.bundles[0], lambda tensor: torch.cat([tensor.new_zeros(1), tensor])[1:])
    found = found._replace(bundles=[odd, found.bundles[1]])
    expected = found.clone()
    tables = found.launch(FP32, None, Flags())
    expected.update(None, Flags())
    assert tables.block_to_param.tolist() == [1, 1, 1]
    assert tables.odd_block_to_param.tolist() == [0]
    assert_same(found, expected)


@interpreted
def test_neighbouring_memory_is_not_touched() -> None:
    dtypes = FP32
    wide = make_case([4096], dtypes)
    part = map_tensors(wide.bundles[0], lambda tensor: tensor[1024:3001])
    narrow = wide._replace(bundles=[part])
    before = wide.clone()
    narrow.launch(dtypes, None, Flags())
    for ours, theirs in zip(wide.bundles[0], before.bundles[0], strict=True):
        if ours is not None and theirs is not None:
            assert torch.equal(ours[:1024], theirs[:1024])
            assert torch.equal(ours[3001:], theirs[3001:])
    assert not torch.equal(wide.bundles[0][0][1024:3001], before.bundles[0][0][1024:3001])


def test_a_model_of_many_tensors_costs_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = MagicMock()
    monkeypatch.setattr(step_kernel, "_kernels", lambda: kernels)
    make_case([64] * 148, FP32).launch(FP32, None, Flags())
    for launched, grid in ((kernels.coefficients_kernel, (148,)), (kernels.update_kernel, (148,))):
        launched.__getitem__.assert_called_once_with(grid)


def test_importing_the_package_does_not_import_triton() -> None:
    code = (
        "import sys, graphfsdp.optim, graphfsdp.optim.fused.kernel; "
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@interpreted
@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("dtypes", [FP32, MIXED])
def test_interpreted_kernel_changes_nothing_where_it_is_told_to_skip(
    dtypes: Dtypes, skip: float
) -> None:
    found = make_case([2048, 100, 4099], dtypes)
    before = found.clone()
    found.bundles[0].grad.fill_(float("nan") if skip else 1.0)
    found.launch(dtypes, None, Flags(), torch.tensor(skip))
    for ours, theirs in zip(found.bundles, before.bundles, strict=True):
        assert torch.equal(ours.param, theirs.param) == bool(skip)
        for left, right in zip(ours[2:4], theirs[2:4], strict=True):
            assert left is not None
            assert right is not None
            assert torch.equal(left, right) == bool(skip)


def _case(dtypes: Dtypes, weights: list[float], grads: list[float]) -> Case:
    case = make_case([NUM_VALUES], dtypes)
    bundle = case.bundles[0]
    bundle.grad.copy_(torch.tensor(grads))
    if bundle.main_param is None:
        bundle.param.copy_(torch.tensor(weights))
    else:
        bundle.main_param.copy_(torch.tensor(weights))
    return case


@interpreted
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weights=ROWS, grads=ROWS, amsgrad=st.booleans(), adam_w_mode=st.booleans())
@pytest.mark.parametrize("dtypes", [FP32, MIXED])
def test_kernel_equals_the_tensor_code_bit_for_bit_whatever_the_values(
    dtypes: Dtypes, weights: list[float], grads: list[float], amsgrad: bool, adam_w_mode: bool
) -> None:
    dtypes = dtypes._replace(max_exp_avg_sq=torch.float32 if amsgrad else None)
    flags = Flags(adam_w_mode)
    found = _case(dtypes, weights, grads)
    expected = found.clone()
    found.launch(dtypes, None, flags)
    expected.update(None, flags)
    assert_same(found, expected, but=["param"] if dtypes.main_param else ())


@settings(max_examples=60)
@given(weights=ROWS, grads=ROWS, amsgrad=st.booleans(), maximize=st.booleans())
@pytest.mark.parametrize("dtypes", [FP32, MIXED])
def test_cpu_path_equals_the_tensor_code_whatever_the_values(
    dtypes: Dtypes, weights: list[float], grads: list[float], amsgrad: bool, maximize: bool
) -> None:
    dtypes = dtypes._replace(max_exp_avg_sq=torch.float32 if amsgrad else None)
    flags = Flags(maximize=maximize)
    found = _case(dtypes, weights, grads)
    before, expected = found.clone(), found.clone()
    found.update_on_cpu(None, flags)
    expected.update(None, flags)
    moments = [case.bundles[0].exp_avg for case in (expected, before)]
    assert moments[0] is not None
    assert moments[1] is not None
    cancelled = moments[0].abs() < 0.1 * moments[1].abs()
    for column in ("exp_avg", "exp_avg_sq", "main_param" if dtypes[-1] else "param"):
        left, right, start = (
            getattr(case.bundles[0], column) for case in (found, expected, before)
        )
        # Flushed subnormals, and a last bit that decides between the largest number and infinity.
        known = ~((left.abs() > 1e37) & (right.abs() > 1e37))
        # A sum that cancels is off by roundings of what was added, and so is all that follows.
        if "param" in column:
            known &= ~cancelled
        units = (right.abs() if column == "exp_avg_sq" else start.abs()).clamp(min=1e-25)[known]
        left, right = left[known] / units, right[known] / units
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, equal_nan=True)


COMPILED = (
    FP32,
    MIXED,
    FP32._replace(
        param=torch.bfloat16, grad=torch.bfloat16, exp_avg=torch.bfloat16, exp_avg_sq=torch.bfloat16
    ),
    MIXED._replace(max_exp_avg_sq=torch.float32),
)


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
    constants = {"ADAM_W_MODE": True, "BIAS_CORRECTION": True}
    compiled = compile_for_sm_90(kernels.coefficients_kernel, signature, constants, 1)
    assert ".target sm_90" in compiled["ptx"]
    assert "fma.rn.f64" in compiled["ptx"]  # exp2 and log2 are not rounded to float32 on the way
    assert len(compiled["cubin"]) > 0


@given(
    lr=st.floats(0, 1),
    beta1=st.floats(0, 0.999),
    beta2=st.floats(0, 0.9999),
    step=st.integers(1, 10**6),
)
def test_coefficients_have_the_accuracy_of_float64(
    lr: float, beta1: float, beta2: float, step: int
) -> None:
    row = torch.tensor([lr, beta1, beta2, 1e-8, 0.1], dtype=torch.float64)
    found = adam_coefficients(row, torch.tensor(float(step)), Flags())
    correction1 = -math.expm1(step * math.log(beta1)) if beta1 else 1.0
    correction2 = -math.expm1(step * math.log(beta2)) if beta2 else 1.0
    # 1 - beta**step cancels: 1e-16 of one is this much of a small difference.
    assert found.step_size.item() == pytest.approx(
        lr / correction1, rel=1e-15 / correction1 + 1e-13
    )
    assert found.root_correction2.item() == pytest.approx(
        math.sqrt(correction2), rel=1e-15 / correction2 + 1e-13
    )


def test_large_tensors_are_cut_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    params, twins = make_twins([(50, 7), (3,), (1000,), (2, 2)])
    set_grads(params, twins)
    scale = torch.tensor(0.5)
    FusedAdam(params).step(grad_scale=scale)
    monkeypatch.setattr(step_module, "_SMALLEST_CHUNK", 64)
    FusedAdam(twins).step(grad_scale=scale)
    assert_equal(params, twins)
