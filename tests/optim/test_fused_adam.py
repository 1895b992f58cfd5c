"""FusedAdam as an optimizer: its numbers, whatever the dtypes, layouts, groups and gradients.

And what a recording sees of a step.
"""

import copy
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adam_helpers import (
    DTYPES,
    assert_equal,
    by_kernels,
    by_tensor_code,
    copy_weights,
    cut_at,
    flatten,
    make_groups,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
from graphfsdp.errors import CaptureError
from graphfsdp.optim import FusedAdam
from helpers import OpNames
from triton_helpers import needs_triton


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


def gaps_of(param: Tensor) -> Tensor:
    storage = param.untyped_storage()
    return torch.empty(0, dtype=param.dtype, device=param.device).set_(storage)[1::2]


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
    """Compare a weight, its main weight and its state with those of torch's."""
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
    bad=st.sampled_from([None, math.nan, math.inf, -math.inf]),
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
    weight is kept. A step is left out by a flag, or where a gradient is ``bad``.
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
                grad[2, 1] = bad
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
                assert bool((gaps_of(param) == 7.0).all())
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


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    (param,) = make_params([(3,)])
    optimizer = FusedAdam([param], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss.item()

    before = (param**2).sum().item()
    assert optimizer.step(closure) == pytest.approx(before)
    assert (param**2).sum().item() < before


@pytest.mark.gpu
def test_a_step_replays_in_a_cuda_graph_with_live_numbers() -> None:
    params, twins = make_twins([(100, 33), (70_000,), (5,)], device="cuda")
    ours, theirs = FusedAdam(params), FusedAdam(twins)
    scale = torch.tensor(0.5, device="cuda")
    set_grads(params, twins)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours.step(grad_scale=scale)
    torch.cuda.current_stream().wait_stream(stream)
    theirs.step(grad_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step(grad_scale=scale)
    for lr in (1e-3, 0.1, 0.5):
        scale.fill_(lr)
        for param, twin in zip(params, twins, strict=True):
            assert param.grad is not None
            param.grad.normal_()
            twin.grad = param.grad.clone()
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = lr
        ours.upload_hyperparameters()
        graph.replay()
        theirs.step(grad_scale=scale)
        assert_equal(params, twins)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_capture_without_a_step_before_it_is_refused() -> None:
    params = make_params(device="cuda")
    optimizer = FusedAdam(params)
    set_grads(params)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="at least one step"), torch.cuda.graph(graph):
        optimizer.step()
