"""Hyper-parameters of FusedAdam are data: each step reads what is in param_groups then."""

import torch

from adam_helpers import assert_equal, make_groups, make_params, make_twins, take_steps
from graphfsdp.optim import FusedAdam


def test_upload_changes_the_table_in_place_and_only_when_needed(device: torch.device) -> None:
    params = make_params([(3,), (2,)], device=device)
    optimizer = FusedAdam(make_groups({"params": params[:1]}, {"params": params[1:], "lr": 0.5}))
    table = optimizer.hyper_table(params[0].device)
    assert table.tolist() == [[1e-3, 0.9, 0.999, 1e-8, 0.0], [0.5, 0.9, 0.999, 1e-8, 0.0]]
    address = table.data_ptr()
    optimizer.param_groups[1]["lr"] = 0.25
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    optimizer.upload_hyperparameters()
    assert table.tolist() == [[1e-3, 0.8, 0.9, 1e-8, 0.0], [0.25, 0.9, 0.999, 1e-8, 0.0]]
    assert optimizer.hyper_table(params[0].device).data_ptr() == address


def test_an_lr_may_turn_from_a_number_into_a_tensor() -> None:
    params, twins = make_twins()
    ours, theirs = FusedAdam(params, lr=0.5), FusedAdam(twins, lr=0.5)
    for lr in (0.5, torch.tensor(0.25), 0.125):
        ours.param_groups[0]["lr"] = lr
        theirs.param_groups[0]["lr"] = float(lr)
        take_steps(1, ours, theirs)
    assert_equal(params, twins)
