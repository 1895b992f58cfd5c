"""Parameters that join late, states that load under a live graph, and the loss scale of torch."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from adam_helpers import assert_equal, make_twins, set_grads, state_addresses
from graphfsdp.optim import DeviceGradScaler, FusedAdam


@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_gradients_that_come_late_and_go_again_step_as_in_torch(
    device: torch.device, settings: dict[str, Any]
) -> None:
    params, twins = make_twins(device=device)
    ours = FusedAdam(params, lr=0.1, **settings)
    theirs = torch.optim.AdamW(twins, lr=0.1, weight_decay=0.0, fused=True, **settings)
    for step in range(12):
        if step == 7:
            late, others = make_twins([(5, 2)], device=device)
            ours.add_param_group({"params": late, "lr": 0.3})
            theirs.add_param_group({"params": others, "lr": 0.3})
            params, twins = [*params, *late], [*twins, *others]
        set_grads(params, twins)
        for index, steps in ((1, range(5)), (0, range(8, 10))):
            if step in steps:
                params[index].grad = twins[index].grad = None
        ours.step()
        theirs.step()
    counts = [ours.state[param]["step"].item() for param in params]
    assert counts == [10, 7, 12, 12, 12, 5]
    if device.type == "cpu":
        assert_equal(params, twins)
    torch.testing.assert_close(params, twins, rtol=1e-5, atol=1e-6)


LIVE: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True},
    "bf16": {"exp_avg_dtype": torch.bfloat16},
    "control": {"max_grad_norm": 0.1, "skip_nonfinite": True},
    "remainders": {"master_weights": True, "store_param_remainders": True},
}


@pytest.mark.parametrize("name", LIVE)
def test_a_live_graph_goes_on_with_a_loaded_state_bit_for_bit(
    device: torch.device, name: str
) -> None:
    dtype = torch.bfloat16 if name == "remainders" else torch.float32
    model = nn.Linear(64, 64).to(device, dtype)
    twin = copy.deepcopy(model)
    ours, other = (FusedAdam(m.parameters(), lr=0.1, **LIVE[name]) for m in (model, twin))

    def loss_fn(module: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = module(x).float().square().mean()
        return loss

    def batch() -> Tensor:
        return torch.randn(3, 64).to(device, dtype)

    with (
        graphfsdp.capture(model, ours, loss_fn=loss_fn) as live,
        graphfsdp.capture(twin, other, loss_fn=loss_fn, scope="none") as eager,
    ):
        for _ in range(8):
            x = batch()
            live(x)
            eager(x)
        weights, state = copy.deepcopy((twin.state_dict(), other.state_dict()))
        addresses = state_addresses(ours)
        for _ in range(4):
            live(batch())
        model.load_state_dict(weights)
        ours.load_state_dict(state)
        assert state_addresses(ours) == addresses
        for _ in range(10):
            x = batch()
            assert torch.equal(live(x), eager(x))
        assert live.report().num_captures == 1
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(left, right)


def test_the_loss_scale_moves_as_that_of_torch_does(device: torch.device) -> None:
    params, twins = make_twins(device=device)
    numbers: dict[str, Any] = {
        "init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3,
    }  # fmt: skip
    scaler = DeviceGradScaler(**numbers, device=device)
    address = scaler.scale.data_ptr()
    ours = FusedAdam(params, lr=0.1, grad_scaler=scaler)
    reference = torch.amp.GradScaler(device.type, **numbers)
    theirs = torch.optim.AdamW(twins, lr=0.1, weight_decay=0.0)
    reference.scale(torch.zeros((), device=device))
    for step in range(20):
        set_grads(params, twins)
        for param in [*params, *twins]:
            assert param.grad is not None
            param.grad *= scaler.scale
        if step in (4, 9, 10):
            for members in (params, twins):
                assert members[1].grad is not None
                members[1].grad[0] = math.inf
        ours.step()
        reference.step(theirs)
        reference.update()
        assert scaler.scale.item() == reference.get_scale(), step
    torch.testing.assert_close(params, twins, rtol=1e-5, atol=1e-6)
    assert scaler.scale.data_ptr() == address
    assert ours.control.skipped_steps.item() == 3
