"""What a recording sees of a step of FusedAdam."""

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from adam_helpers import (
    SeenOps,
    assert_equal,
    make_groups,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
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


def test_a_changed_hyper_parameter_is_no_operation_and_is_seen_by_a_rerun(
    device: torch.device,
) -> None:
    params, twins = make_twins(device=device)
    optimizer, reference = FusedAdam(params), FusedAdam(twins)
    take_steps(1, optimizer, reference)
    optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.5
    if device.type == "cuda":
        optimizer.upload_hyperparameters()
    with SeenOps() as ops:
        optimizer.step()
    reference.step()
    assert not ops.of("aten")
    # What a replay does: upload, then the recorded operation on the recorded tensors.
    ((func, args),) = ops.of("graphfsdp")
    optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.125
    optimizer.upload_hyperparameters()
    with torch.no_grad():
        func(*args)
    reference.step()
    assert_equal(params, twins)


def test_no_value_is_read_on_the_host_outside_the_operation(device: torch.device) -> None:
    class Calls(TorchFunctionMode):
        names: ClassVar[set[str]] = set()

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            self.names.add(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    params = make_params(device=device)
    scale = torch.tensor(0.5, device=device)
    optimizer = FusedAdam(params)
    set_grads(params)
    optimizer.step(grad_scale=scale)
    with Calls() as calls, SeenOps():
        optimizer.step(grad_scale=scale)
    assert "data_ptr" in calls.names  # it does see what is called
    reads = {"item", "tolist", "numpy", "__float__", "__bool__", "cpu", "to", "is_nonzero"}
    assert not calls.names & reads


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
