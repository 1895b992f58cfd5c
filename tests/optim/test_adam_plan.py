"""Which tensors a step of FusedAdam takes: layouts, missing and new gradients, the CUDA path."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from adam_helpers import (
    assert_equal,
    make_groups,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
from adam_kernel_cases import interpreter, kernel_path, step_as_a_cpu_does  # noqa: F401  (fixtures)
from graphfsdp.errors import CaptureError
from graphfsdp.optim import FusedAdam
from triton_helpers import needs_triton


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


@needs_triton
@pytest.mark.usefixtures("kernel_path")
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"amsgrad": True}),
        (torch.float16, {}),
        (torch.bfloat16, {"maximize": True}),
    ],
    ids=["amsgrad", "plain", "main weights"],
)
def test_tables_and_kernels_take_the_steps_that_the_cpu_takes(
    dtype: torch.dtype, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, twins = make_twins([(40, 60), (7,), (0,), (3, 5)], dtype=dtype)

    def make(members: list[nn.Parameter]) -> FusedAdam:
        groups = make_groups(
            {"params": members[:2]}, {"params": members[2:], "lr": 0.1, "betas": (0.5, 0.6)}
        )
        return FusedAdam(groups, lr=1e-2, weight_decay=0.1, master_weights=True, **settings)

    ours, theirs = make(params), make(twins)
    scale, skip = torch.tensor(0.5), torch.tensor(0.0)
    for step in range(5):
        set_grads(params, twins)
        skip.fill_(float(step == 3))
        if step == 1:  # one falls behind by a step
            params[1].grad = twins[1].grad = None
        if step == 2:
            ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.3
        ours.step(grad_scale=scale, found_inf=skip)
        with monkeypatch.context() as cpu:
            step_as_a_cpu_does(cpu)
            theirs.step(grad_scale=scale, found_inf=skip)
    for param, twin in zip(params, twins, strict=True):
        for key, tensor in ours.state[param].items():
            torch.testing.assert_close(tensor, theirs.state[twin][key], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(param, twin, rtol=1e-2, atol=1e-3)


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
