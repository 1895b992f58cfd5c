"""FusedAdam as an optimizer: its numbers, whatever the dtypes, groups and gradients.

And what a recording sees of a step.
"""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from adam_helpers import (
    DTYPES,
    SeenOps,
    assert_equal,
    flatten,
    make_groups,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
from adam_kernel_cases import step_by_tensor_code
from graphfsdp.optim import FusedAdam


@pytest.fixture(params=["torch's kernels", "tensor code"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step as the CPU does, and as any device does that no kernel fits."""
    if request.param == "tensor code":
        step_by_tensor_code(monkeypatch)


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


def test_a_scale_of_one_changes_no_bit(device: torch.device) -> None:
    params, twins = make_twins(device=device)
    set_grads(params, twins)
    FusedAdam(params).step(grad_scale=torch.ones((), device=device))
    FusedAdam(twins).step()
    assert_equal(params, twins)


def test_a_call_takes_parameters_in_their_order_wherever_they_lie() -> None:
    memory = torch.randn(30)
    params = [torch.nn.Parameter(memory[start : start + 10]) for start in (20, 0, 10)]
    set_grads(params)
    with SeenOps() as ops:
        FusedAdam(params).step()
    ((_, args),) = ops.of("graphfsdp")
    assert [tensor.data_ptr() for tensor in args[0]] == [param.data_ptr() for param in params]


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
        with SeenOps() as ops:
            optimizer.step(grad_scale=scale)
        assert [str(func) for func, _ in ops.of("graphfsdp")] == [
            "graphfsdp.fused_adam_.default",
            "graphfsdp.fused_adam_.default",
        ]
        assert not ops.of("aten")


def test_an_lr_tensor_is_copied_on_the_device_inside_the_step(device: torch.device) -> None:
    params = make_params(device=device)
    optimizer = FusedAdam(params, lr=torch.tensor(0.1, device=device))
    take_steps(1, optimizer)
    with SeenOps() as ops:
        optimizer.step()
    assert [str(func) for func, _ in ops.of("aten")] == ["aten.copy_.default"]


def test_the_operation_declares_all_that_it_writes(device: torch.device) -> None:
    params = make_params(dtype=torch.bfloat16, device=device)
    optimizer = FusedAdam(params, master_weights=True)
    set_grads(params)
    with SeenOps() as ops:
        optimizer.step()
    ((func, args),) = ops.of("graphfsdp")
    before = copy.deepcopy(args)
    with torch.no_grad():
        func(*args)
    arguments = func._schema.arguments
    for argument, old, new in zip(arguments, before, args, strict=True):
        is_list = isinstance(new, list) and bool(new) and isinstance(new[0], Tensor)
        pairs: list[tuple[Any, Any]] = list(zip(old, new, strict=True)) if is_list else [(old, new)]
        changed = any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in pairs)
        if new is None or new == []:
            continue
        declared = argument.alias_info is not None and argument.alias_info.is_write
        assert changed == declared, argument.name
