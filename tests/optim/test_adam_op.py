"""What a recording sees of a step of FusedAdam."""

import copy
from typing import Any

import torch
from torch import Tensor

from adam_helpers import SeenOps, make_groups, make_params, set_grads, take_steps
from graphfsdp.optim import FusedAdam


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
