"""FusedAdam as an optimizer: its numbers, whatever the dtypes, layouts, groups and gradients.

And what a recording sees of a step.
"""

import copy
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from adam_helpers import (
    DTYPES,
    assert_equal,
    by_tensor_code,
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


@pytest.fixture(params=[nullcontext, by_tensor_code], ids=["torch's kernels", "tensor code"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Step as the CPU does, and as any device does that no kernel fits."""
    with request.param():
        yield


@pytest.mark.usefixtures("path")
def test_without_bias_correction_the_first_step_is_that_of_the_formula(
    device: torch.device,
) -> None:
    param = nn.Parameter(torch.ones(4, device=device))
    optimizer = FusedAdam([param], lr=0.5, betas=(0.9, 0.99), eps=0.0, bias_correction=False)
    param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    # m / sqrt(v) = 0.1 g / (0.1 |g|) = 1
    torch.testing.assert_close(param.detach(), torch.full_like(param, 0.5))


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6),
    flat=st.booleans(),
    num_groups=st.integers(1, 3),
    missing=st.sets(st.integers(0, 5)),
    rule=st.fixed_dictionaries(dict.fromkeys(("amsgrad", "maximize"), st.booleans())),
    adam_w_mode=st.booleans(),
)
def test_any_shapes_groups_and_missing_gradients_equal_torch(
    shapes: list[tuple[int, ...]],
    flat: bool,
    num_groups: int,
    missing: set[int],
    rule: dict[str, Any],
    adam_w_mode: bool,
) -> None:
    """Of parameters that join late, too, and of gradients whose sizes fall and rise."""
    params, twins = make_twins(shapes)
    late, others = make_twins([(5, 2)])
    if flat:
        flatten(params)

    def groups(members: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": members[row::num_groups], "weight_decay": 0.1 * row, "lr": 0.1 / (1 + row)}
            for row in range(num_groups)
        ]

    make = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    ours = FusedAdam(groups(params), adam_w_mode=adam_w_mode, **rule)
    theirs = make(groups(twins), fused=True, **rule)
    for step in range(6):
        if step == 3:
            ours.add_param_group({"params": late, "lr": 0.3, "weight_decay": 0.0})
            theirs.add_param_group({"params": others, "lr": 0.3, "weight_decay": 0.0})
            params, twins = [*params, *late], [*twins, *others]
        for index, (param, twin) in enumerate(zip(params, twins, strict=True)):
            if index in missing and step % 2:
                param.grad = twin.grad = None
                continue
            grad = torch.randn(param.shape) * 10.0 ** -(step % 4)
            twin.grad = grad.clone()
            if flat and param.grad is not None:
                param.grad.copy_(grad)
            else:
                param.grad = grad
        ours.step()
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
        state, other = ours.state.get(param, {}), theirs.state.get(twin, {})
        assert state.get("step", 0) == other.get("step", 0)
        for key in other if state else ():
            assert torch.equal(state[key], other[key]), key


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_float64_parameters_keep_their_precision(adam_w_mode: bool) -> None:
    params, twins = make_twins(dtype=torch.float64)
    make = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    ours = FusedAdam(params, lr=0.1, weight_decay=0.1, adam_w_mode=adam_w_mode)
    take_steps(30, ours, make(twins, lr=0.1, weight_decay=0.1))
    torch.testing.assert_close(params, twins, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("master_weights", [True, False])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_every_combination_of_dtypes_steps_in_float32(
    device: torch.device,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    master_weights: bool,
    scale: float | None,
) -> None:
    params = make_params(dtype=dtype, device=device)
    wide = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = FusedAdam(
        params, lr=1e-2, weight_decay=0.1, use_decoupled_grad=True, master_weights=master_weights
    )
    reference = FusedAdam(wide, lr=1e-2, weight_decay=0.1)
    factor = None if scale is None else torch.tensor(scale, device=device)
    for _ in range(3):
        for param, twin in zip(params, wide, strict=True):
            grad = torch.randn(param.shape, device=device).to(grad_dtype)
            param.decoupled_grad = grad  # type: ignore[attr-defined]
            twin.grad = grad.float() * (1.0 if scale is None else scale)
            if dtype != torch.float32 and not master_weights:
                twin.data.copy_(param)  # the stored weight is all there is
        optimizer.step(grad_scale=factor)
        reference.step()
    for param, twin in zip(params, wide, strict=True):
        torch.testing.assert_close(param.detach(), twin.detach().to(dtype), rtol=1e-6, atol=1e-7)
        assert optimizer.state[param]["exp_avg"].dtype == torch.float32
        assert ("master_param" in optimizer.state[param]) == (
            master_weights and dtype != torch.float32
        )


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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("grad_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_layout_of_weight_and_gradient_may_differ(
    device: torch.device,
    memory_format: torch.memory_format,
    grad_format: torch.memory_format,
    scale: float,
) -> None:
    weights = [torch.randn(2, 3, 4, 5, device=device), torch.randn(3, 2, 2, 2, device=device)]
    params = [nn.Parameter(weight.to(memory_format=memory_format)) for weight in weights]
    twins = [nn.Parameter(weight.clone()) for weight in weights]
    ours, theirs = FusedAdam(params, lr=0.1), torch.optim.AdamW(twins, lr=0.1, weight_decay=0)
    for _ in range(3):
        for param, twin in zip(params, twins, strict=True):
            grad = torch.randn_like(twin)
            param.grad = grad.to(memory_format=grad_format)
            twin.grad = grad * scale
        ours.step(grad_scale=torch.tensor(scale, device=device))
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param.detach(), twin.detach(), rtol=1e-6, atol=1e-6)


def test_a_parameter_with_gaps_is_updated_and_its_neighbours_are_not(device: torch.device) -> None:
    storage = torch.randn(6, 8, device=device)
    before = storage.clone()
    param = nn.Parameter(storage[:, :3])
    twin = nn.Parameter(before[:, :3].clone())
    set_grads([param], [twin])
    FusedAdam([param], lr=0.1).step()
    torch.optim.AdamW([twin], lr=0.1, weight_decay=0).step()
    torch.testing.assert_close(param.detach(), twin.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(storage[:, 3:], before[:, 3:])


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


def test_a_parameter_that_moved_is_followed() -> None:
    params, twins = make_twins()
    ours, theirs = FusedAdam(params), FusedAdam(twins)
    for step in range(3):
        set_grads(params, twins)
        if step == 1:
            for param in params:
                param.data = param.data.clone()
        ours.step()
        theirs.step()
    assert_equal(params, twins)


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
