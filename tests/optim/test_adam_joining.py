"""Parameters that join late, and the loss scale of torch."""

import math
from typing import Any

import pytest
import torch

from adam_helpers import assert_equal, make_twins, set_grads
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
