"""Any values: huge, tiny, infinite, NaN; the kernel, the CPU path and the tensor code agree."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from adam_kernel_cases import FP32, MIXED, Case, make_case, needs_triton, use_interpreter
from graphfsdp.optim.fused.settings import Flags
from graphfsdp.optim.fused.step import StepArgs, run_cpu
from graphfsdp.optim.fused.storage import Dtypes, make_columns

VALUES = st.sampled_from(
    [0.0, -0.0, 1.0, -3.0, 1e-20, 1e-38, -1e-45, 1e18, 1e30, -3e38, np.inf, -np.inf, np.nan]
)
NUM_VALUES = 8
ROWS = st.lists(VALUES, min_size=NUM_VALUES, max_size=NUM_VALUES)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels in Triton's interpreter."""
    use_interpreter(monkeypatch)
    with np.errstate(all="ignore"):
        yield


def _case(dtypes: Dtypes, weights: list[float], grads: list[float]) -> Case:
    case = make_case([NUM_VALUES], dtypes)
    bundle = case.bundles[0]
    bundle.grad.copy_(torch.tensor(grads))
    if bundle.main_param is None:
        bundle.param.copy_(torch.tensor(weights))
    else:
        bundle.main_param.copy_(torch.tensor(weights))
    return case


def _run_on_cpu(case: Case, flags: Flags) -> None:
    bundle = case.bundles[0]
    before = case.steps[0] - 1  # the operation counts the step itself
    run_cpu(
        StepArgs(
            make_columns([bundle]),
            [before.view(1)], case.hyper, [0], [1], [0], None, None, None, [],
            None, 0, True, flags=flags,
        )
    )  # fmt: skip


def _assert_same(left: Tensor, right: Tensor, *, exact: bool) -> None:
    if exact:
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
        return
    # Flushed subnormals, and a last bit that decides between the largest number and infinity.
    limit = 1e37
    both_huge = (left.abs() > limit) & (right.abs() > limit)
    torch.testing.assert_close(
        left[~both_huge], right[~both_huge], rtol=1e-5, atol=1e-30, equal_nan=True
    )


@needs_triton
@pytest.mark.usefixtures("interpreter")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weights=ROWS, grads=ROWS, amsgrad=st.booleans(), adam_w_mode=st.booleans())
@pytest.mark.parametrize("dtypes", [FP32, MIXED])
def test_kernel_equals_the_tensor_code_bit_for_bit_whatever_the_values(
    dtypes: Dtypes,
    weights: list[float],
    grads: list[float],
    amsgrad: bool,
    adam_w_mode: bool,
) -> None:
    dtypes = dtypes._replace(max_exp_avg_sq=torch.float32 if amsgrad else None)
    flags = Flags(adam_w_mode)
    found = _case(dtypes, weights, grads)
    expected = found.clone()
    found.launch(dtypes, None, flags)
    expected.update(None, flags)
    for column in (
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "main_param" if dtypes[-1] else "param",
    ):
        left = getattr(found.bundles[0], column)
        if left is not None:
            _assert_same(left, getattr(expected.bundles[0], column), exact=True)


@settings(max_examples=60)
@given(weights=ROWS, grads=ROWS, amsgrad=st.booleans(), maximize=st.booleans())
@pytest.mark.parametrize("dtypes", [FP32, MIXED])
def test_cpu_path_equals_the_tensor_code_whatever_the_values(
    dtypes: Dtypes,
    weights: list[float],
    grads: list[float],
    amsgrad: bool,
    maximize: bool,
) -> None:
    dtypes = dtypes._replace(max_exp_avg_sq=torch.float32 if amsgrad else None)
    flags = Flags(maximize=maximize)
    found = _case(dtypes, weights, grads)
    expected = found.clone()
    _run_on_cpu(found, flags)
    expected.update(None, flags)
    for column in ("exp_avg", "exp_avg_sq", "main_param" if dtypes[-1] else "param"):
        left, right = getattr(found.bundles[0], column), getattr(expected.bundles[0], column)
        _assert_same(left, right, exact=False)
