"""FusedAdam as an optimizer: its numbers, whatever the dtypes, layouts, groups and gradients.

What a recording sees of a step. And the Triton kernels: interpreted on the CPU, compiled for sm_90,
and on a GPU.
"""

import copy
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adam_helpers import (
    DTYPES,
    as_on_cuda,
    by_kernels,
    by_tensor_code,
    copy_weights,
    cut_at,
    flatten,
    make_groups,
    make_params,
    set_grads,
    take_steps,
)
from graphfsdp.errors import CaptureError
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused import kernel as step_kernel
from graphfsdp.optim.fused.state import Flags
from graphfsdp.optim.fused.update import Dtypes
from helpers import OpNames
from triton_helpers import (
    compile_for_sm_90,
    fresh_kernels,
    needs_triton,
    resources,
)


def test_without_bias_correction_the_first_step_is_that_of_the_formula(
    device: torch.device,
) -> None:
    param = nn.Parameter(torch.ones(4, device=device))
    optimizer = FusedAdam([param], lr=0.5, betas=(0.9, 0.99), eps=0.0, bias_correction=False)
    param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    # m / sqrt(v) = 0.1 g / (0.1 |g|) = 1
    torch.testing.assert_close(param.detach(), torch.full_like(param, 0.5))


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "with gaps":
        return torch.stack([tensor, torch.full_like(tensor, 7.0)], -1)[..., 0]
    return tensor.mT.contiguous().mT if layout == "permuted" and tensor.dim() > 1 else tensor


def make_pairs(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, layout: str
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return parameters, and others of the same values in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    params = [nn.Parameter(laid_out(p.detach(), layout)) for p in make_params(shapes, dtype)]
    return params, [
        nn.Parameter(param.detach().to(wide, copy=True).contiguous()) for param in params
    ]


def groups(members: list[nn.Parameter], num_groups: int) -> list[dict[str, Any]]:
    found = enumerate([(0.9, 0.999), (0.0, 0.5), (0.8, 0.95)][:num_groups])
    return [{"params": members[row::num_groups], "betas": betas} for row, betas in found]


def set_numbers(ours: FusedAdam, theirs: Any, step: int) -> None:
    """Give each group other numbers in each step."""
    pairs = zip(ours.param_groups, theirs.param_groups, strict=True)
    for row, (group, other) in enumerate(pairs):
        group["lr"] = other["lr"] = 0.1 / (1 + row + step)
        group["weight_decay"] = other["weight_decay"] = 0.1 * row + 0.05 * (step % 2)


def happens(
    event: str | None,
    ours: FusedAdam,
    theirs: Any,
    params: list[nn.Parameter],
    twins: list[nn.Parameter],
) -> None:
    """Do to weights and states what users do between two steps."""
    if event == "cleared":
        ours.state.clear()
        theirs.state.clear()
        copy_weights(params, twins)
    for param, twin in zip(params, twins, strict=True):
        if event == "moved":
            param.data = param.data.clone()
        if event == "replaced" and theirs.state.get(twin):
            moment = torch.randn_like(ours.state[param]["exp_avg"])
            ours.state[param]["exp_avg"] = moment
            theirs.state[twin]["exp_avg"] = moment.clone(memory_format=torch.contiguous_format)


def compare(
    param: Tensor, state: dict[str, Any], twin: Tensor, other: dict[str, Any], *, is_exact: bool
) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}

    def check(found: Tensor, expected: Tensor) -> None:
        if is_exact:
            assert torch.equal(found, expected)
        else:
            close = tolerance.get(found.dtype, torch.finfo(found.dtype).eps)
            torch.testing.assert_close(found, expected, rtol=close, atol=close)

    main = state.get("master_param", param.detach())
    check(main, twin.detach().to(main.dtype))
    check(param.detach(), main.to(param.dtype))
    assert state.get("step", 0) == other.get("step", 0)
    for key in other if state else ():
        check(state[key], other[key])


NUM_STEPS, EVENT_STEP = 6, 3
STEPS = st.integers(0, NUM_STEPS - 1)


@pytest.mark.parametrize(
    "path", [nullcontext, by_tensor_code, pytest.param(by_kernels, marks=needs_triton)]
)
# To find the smallest example takes minutes in the interpreter.
@settings(max_examples=50, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6),
    dtype=st.sampled_from([torch.float64, *DTYPES]),
    grad_dtype=st.sampled_from([None, *DTYPES]),
    layout=st.sampled_from(["own", "permuted", "with gaps", "flat"]),
    grad_layout=st.sampled_from(["own", "permuted", "with gaps"]),
    num_groups=st.integers(1, 3),
    missing=st.sets(st.integers(0, 5)),
    rule=st.fixed_dictionaries(dict.fromkeys(("amsgrad", "maximize"), st.booleans())),
    adam_w_mode=st.booleans(),
    master_weights=st.booleans(),
    scale=st.sampled_from([None, 0.5, 1.0]),
    skips=st.sets(STEPS),
    bad=st.sampled_from([None, math.nan, math.inf, -math.inf, 1e25]),
    event=st.sampled_from([None, "joined", "moved", "replaced", "cleared"]),
    chunk=st.sampled_from([64, 1 << 17]),
)
def test_steps_are_those_of_torch(
    path: Callable[[], AbstractContextManager[object]],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    layout: str,
    grad_layout: str,
    num_groups: int,
    missing: set[int],
    rule: dict[str, Any],
    adam_w_mode: bool,
    master_weights: bool,
    scale: float | None,
    skips: set[int],
    bad: float | None,
    event: str | None,
    chunk: int,
) -> None:
    """Whatever shapes, dtypes, layouts, groups and numbers, with steps that are left out.

    A narrow weight takes the steps of a wide one, which begins each as the narrow one where no main
    weight is kept. A step is left out by a flag, or where a gradient is ``bad``: not finite, or its
    norm is beyond the range of float32, as the document says.
    """
    decoupled = grad_dtype is not None
    attribute = "decoupled_grad" if decoupled else "grad"
    is_narrow = dtype.itemsize < 4
    is_exact = path is nullcontext and {layout, grad_layout} <= {"own", "flat"}
    params, twins = make_pairs([(3, 2), *shapes], dtype, layout)
    late, others = make_pairs([(5, 2)], dtype, layout)
    if layout == "flat":
        flatten(params)
    make = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    ours = FusedAdam(
        groups(params, num_groups),
        adam_w_mode=adam_w_mode,
        use_decoupled_grad=decoupled,
        master_weights=master_weights,
        skip_nonfinite=bad is not None,
        **rule,
    )
    theirs = make(groups(twins, num_groups), fused=True, **rule)
    for step in range(NUM_STEPS):
        if step == EVENT_STEP and event == "joined":
            ours.add_param_group({"params": late})
            theirs.add_param_group({"params": others})
            params, twins = [*params, *late], [*twins, *others]
        elif step == EVENT_STEP:
            happens(event, ours, theirs, params, twins)
        for index, (param, twin) in enumerate(zip(params, twins, strict=True)):
            if index - 1 in missing and step % 2:
                setattr(param, attribute, None)
                twin.grad = None
                continue
            grad = (torch.randn(param.shape) * 10.0 ** -(step % 4)).to(grad_dtype or dtype)
            twin.grad = grad.to(twin.dtype) * (scale or 1.0)
            if index == 0 and step in skips and bad is not None:
                # A norm of float64 is beyond float32 where it is so itself, and not its square.
                grad[2, 1] = bad * 1e20 if grad.dtype == torch.float64 else bad
            if layout == "flat" and getattr(param, attribute, None) is not None:
                getattr(param, attribute).copy_(grad)
            else:
                setattr(param, attribute, laid_out(grad, grad_layout))
        set_numbers(ours, theirs, step)
        if is_narrow and not master_weights:
            copy_weights(params, twins)  # the stored weight is all there is
        given: dict[str, Any] = {} if scale is None else {"grad_scale": torch.tensor(scale)}
        if skips and bad is None:
            given["found_inf"] = torch.tensor(float(step in skips))
        with path(), cut_at(chunk):
            ours.step(**given)
        if step not in skips:
            theirs.step()
        for param, twin in zip(params, twins, strict=True):
            state = ours.state.get(param, {})
            assert not state or ("master_param" in state) == (is_narrow and master_weights)
            compare(param, state, twin, theirs.state.get(twin, {}), is_exact=is_exact)
            if layout == "with gaps" and event != "moved":
                memory = torch.empty(0, dtype=param.dtype).set_(param.untyped_storage())
                assert bool((memory[1::2] == 7.0).all())
    assert ours.control.skipped_steps.item() == len(skips)


def test_a_step_is_one_operation_per_dtype_combination(device: torch.device) -> None:
    narrow = make_params(dtype=torch.bfloat16, device=device)
    wide = make_params(device=device)
    optimizer = FusedAdam(
        make_groups(
            {"params": [*narrow, *wide]}, {"params": make_params(device=device), "lr": 0.1}
        ),
        master_weights=True,
    )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    scale = torch.tensor(0.5, device=device)
    for _ in range(2):  # the first step, which makes the state, shows no more than the second
        set_grads(params)
        with OpNames() as seen:
            optimizer.step(grad_scale=scale)
        names = [name for name in seen.names if not name.startswith("profiler.")]
        assert names == ["graphfsdp.fused_adam_.default"] * 2


def test_the_operation_declares_all_that_it_writes(device: torch.device) -> None:
    params = make_params(dtype=torch.bfloat16, device=device)
    optimizer = FusedAdam(params, master_weights=True)
    set_grads(params)
    operation = torch.ops.graphfsdp.fused_adam_.default
    with patch("graphfsdp.optim.fused.plan.fused_adam_") as called:
        optimizer.step()
    args = called.call_args.args
    before = copy.deepcopy(args)
    with torch.no_grad():
        operation(*args)
    arguments = operation._schema.arguments
    for argument, old, new in zip(arguments, before, args, strict=True):
        is_list = isinstance(new, list) and bool(new) and isinstance(new[0], Tensor)
        pairs: list[tuple[Any, Any]] = list(zip(old, new, strict=True)) if is_list else [(old, new)]
        changed = any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in pairs)
        if new is None or new == []:
            continue
        declared = argument.alias_info is not None and argument.alias_info.is_write
        assert changed == declared, argument.name


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_resets_both_kinds_of_gradient(set_to_none: bool) -> None:
    param, untouched = make_params([(4,), (4,)])
    optimizer = FusedAdam([param, untouched], use_decoupled_grad=True)
    param.grad = torch.ones(4)
    param.decoupled_grad = torch.ones(4)  # type: ignore[attr-defined]
    optimizer.zero_grad(set_to_none=set_to_none)
    for grad in (param.grad, param.decoupled_grad):  # type: ignore[attr-defined]
        assert grad is None if set_to_none else torch.equal(grad, torch.zeros(4))


def test_the_optimizer_does_not_keep_gradients_alive() -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    take_steps(1, optimizer)
    storages = [weakref.ref(param.grad) for param in params]
    optimizer.zero_grad()
    assert [ref() for ref in storages] == [None] * len(params)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_capture_without_a_step_before_it_is_refused() -> None:
    params = make_params(device="cuda")
    optimizer = FusedAdam(params)
    set_grads(params)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="at least one step"), torch.cuda.graph(graph):
        optimizer.step()


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
