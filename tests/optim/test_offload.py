"""Optimizer state in the CPU's memory: the steps, what a device is spared, captures."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from adam_helpers import (
    Net,
    assert_equal,
    copies_of,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
from graphfsdp.optim import CPUOffload, FusedAdam
from graphfsdp.optim.offload.offload import choose_offloaded
from offload_helpers import KINDS, NARROW, SHAPES


def assert_same(left: list[nn.Parameter], right: list[nn.Parameter]) -> None:
    """The same kernels give equal bits; a GPU's kernels are others than the CPU's."""
    if left[0].is_cpu:
        assert_equal(left, right)
        return
    for ours, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=2e-2 if ours.dtype == NARROW else 1e-5, atol=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_steps_are_those_of_the_optimizer_on_the_device(
    device: torch.device, kind: str, fraction: float
) -> None:
    dtype, make = KINDS[kind]
    params, twins = make_twins(SHAPES, dtype, device)
    ours = CPUOffload(make(params), offload_fraction=fraction, bucket_bytes=500)
    theirs = make(twins)
    for step in range(6):
        set_grads(params, twins)
        if step == 3:
            params[0].grad = twins[0].grad = None
        for optimizer in (ours, theirs):
            optimizer.param_groups[0].update(lr=0.1 / (1 + step), weight_decay=0.1 * step)
            scale, flag = torch.tensor([0.5, float(step == 4)], device=device)
            optimizer.step(grad_scale=scale, found_inf=flag)
    assert_same(params, twins)
    assert ours.control.skipped_steps.item() == 1
    for param, twin in zip(params, twins, strict=True):
        for key, value in ours.state[param].items():
            place = "cpu" if any(param is other for other in ours.offloaded) else device.type
            assert value.device.type == place
            if device.type == "cpu":
                assert torch.equal(value, theirs.state[twin][key]), key


def test_decoupled_gradients_own_clipping_and_skipping(device: torch.device) -> None:
    params, twins = make_twins(SHAPES, NARROW, device)
    settings: dict[str, Any] = {
        "lr": 0.1,
        "master_weights": True,
        "use_decoupled_grad": True,
        "max_grad_norm": 0.1,
        "skip_nonfinite": True,
    }
    ours = CPUOffload(FusedAdam(params, **settings), offload_fraction=0.5)
    theirs = FusedAdam(twins, **settings)
    for step in range(5):
        for param, twin in zip(params, twins, strict=True):
            grad = torch.randn(param.shape, device=device)
            grad = grad * torch.nan if step == 2 else grad
            param.decoupled_grad = twin.decoupled_grad = grad  # type: ignore[attr-defined]
        ours.step()
        theirs.step()
    torch.testing.assert_close(ours.control.grad_norm, theirs.control.grad_norm)
    assert ours.control.skipped_steps.item() == theirs.control.skipped_steps.item() == 1
    for param, twin in zip(params, twins, strict=True):
        main = [o.state[p]["master_param"] for o, p in ((ours, param), (theirs, twin))]
        torch.testing.assert_close(main[0].to(device), main[1], rtol=1e-5, atol=1e-6)
    ours.zero_grad()
    assert all(param.decoupled_grad is None for param in params)  # type: ignore[attr-defined]


def test_the_first_parameters_are_offloaded_until_the_fraction_is_reached() -> None:
    assert choose_offloaded([10, 20, 30, 40], 0.0) == [False] * 4
    assert choose_offloaded([10, 20, 30, 40], 0.3) == [True, True, False, False]
    assert choose_offloaded([10, 20, 30, 40], 0.31) == [True, True, True, False]
    assert choose_offloaded([10, 0, 30, 40], 1.0) == [True] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_memory_is_saved_as_computed(device: torch.device, kind: str, fraction: float) -> None:
    dtype, make = KINDS[kind]
    params = make_params(SHAPES, dtype, device)
    optimizer = CPUOffload(make(params), offload_fraction=fraction)
    saved = optimizer.saved_bytes
    take_steps(1, optimizer)
    offloaded = {id(param) for param in optimizer.offloaded}
    held = [
        sum(
            value.nbytes
            for param, state in optimizer.state.items()
            for key, value in state.items()
            if key != "step" and (id(param) in offloaded) == wanted
        )
        for wanted in (True, False)
    ]
    assert held[0] == saved
    everything = sum(p.numel() for p in params)
    per_element = {"adam": 8, "bf16": 12, "remainders": 10, "sgd": 4, "lion": 8}
    if fraction != 0.5 and kind in per_element:
        assert saved == fraction * everything * per_element[kind]
        assert held[1] == (1 - fraction) * everything * per_element[kind]
    numel = sum(param.numel() for param in optimizer.offloaded)
    weights = [weight for part in optimizer.host_parts for weight in part.weights]
    copies = sum(w.nbytes + w.decoupled_grad.nbytes for w in weights)  # type: ignore[attr-defined]
    assert copies == 2 * numel * dtype.itemsize  # weights and gradients


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_memory_is_pinned_only_when_asked_for(pinned: bool) -> None:
    params = make_params(device="cuda")
    optimizer = CPUOffload(FusedAdam(params), pin_cpu_params=pinned, pin_cpu_grads=pinned)
    take_steps(1, optimizer)
    for part in optimizer.host_parts:
        for weight in part.weights:
            grad: Tensor = weight.decoupled_grad  # type: ignore[attr-defined]
            if weight.numel():  # whether nothing is pinned, torch's releases see in their own ways
                assert weight.is_pinned() == grad.is_pinned() == pinned


def test_nothing_is_pinned_where_there_is_no_gpu() -> None:
    params = make_params()
    optimizer = CPUOffload(FusedAdam(params), pin_cpu_params=True, pin_cpu_grads=True)
    set_grads(params)
    optimizer.step()  # page-locked memory would be an error here


def test_capture_on_an_example_leaves_new_state(device: torch.device) -> None:
    def first_weights(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net().to(device)
        optimizer = CPUOffload(FusedAdam(model.parameters(), lr=0.1), offload_fraction=0.5)
        with graphfsdp.capture(model, optimizer, scope="forward_backward", **options) as step:
            torch.manual_seed(1)
            for _ in range(3):
                step(torch.randn(5, 6, device=device))
        return [param.detach().clone() for param in model.parameters()]

    ahead = first_weights(example_batch=torch.zeros(5, 6, device=device))
    for left, right in zip(first_weights(), ahead, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("way", ["in place", "other memory"])
def test_weights_that_somebody_else_writes_are_seen(device: torch.device, way: str) -> None:
    params = make_params(SHAPES, device=device)
    optimizer = CPUOffload(FusedAdam(params, lr=0.1))
    twins = copies_of(params)
    theirs = FusedAdam(twins, lr=0.1)
    for index in range(3):
        take_steps(1, optimizer, theirs)
        if index == 1:
            for param, twin in zip(params, twins, strict=True):
                with torch.no_grad():
                    twin.mul_(2)
                    if way == "in place":
                        param.mul_(2)
                    else:
                        param.data = 2 * param.data
    assert_same(params, twins)
