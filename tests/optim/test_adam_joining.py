"""Parameters that join late."""

from typing import Any

import pytest
import torch

from adam_helpers import assert_equal, make_twins, set_grads
from graphfsdp.optim import FusedAdam


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
