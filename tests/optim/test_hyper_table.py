"""Hyper-parameters of FusedAdam are data: each step reads what is in param_groups then."""

from collections.abc import Callable

import pytest
import torch

from adam_helpers import assert_equal, copies_of, make_groups, make_params, set_grads
from graphfsdp.optim import FusedAdam


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 0.5), ("weight_decay", 0.7), ("betas", (0.5, 0.6)), ("eps", 1.0)],
)
def test_each_hyper_parameter_is_read_by_the_next_step(
    device: torch.device, key: str, value: object
) -> None:
    params = make_params(device=device)
    twins = copies_of(params)
    ours = FusedAdam(params, weight_decay=0.1)
    theirs = torch.optim.AdamW(twins, weight_decay=0.1)
    set_grads(params, twins)
    ours.step()
    theirs.step()
    for group in (ours.param_groups[0], theirs.param_groups[0]):
        group[key] = value
    ours.step()
    theirs.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-6)


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


def test_an_lr_tensor_is_read_by_each_step_and_kept(device: torch.device) -> None:
    params = make_params(device=device)
    twins = copies_of(params)
    lr = torch.tensor(0.1, device=device)
    ours, theirs = FusedAdam(params, lr=lr), FusedAdam(twins, lr=0.1)
    for value in (0.1, 0.3, 0.01):
        lr.fill_(value)
        theirs.param_groups[0]["lr"] = lr.item()  # rounded to float32 as the tensor is
        set_grads(params, twins)
        ours.step()
        theirs.step()
    assert ours.param_groups[0]["lr"] is lr
    assert_equal(params, twins)


def test_an_lr_may_turn_from_a_number_into_a_tensor() -> None:
    params = make_params()
    twins = copies_of(params)
    ours, theirs = FusedAdam(params, lr=0.5), FusedAdam(twins, lr=0.5)
    for lr in (0.5, torch.tensor(0.25), 0.125):
        ours.param_groups[0]["lr"] = lr
        theirs.param_groups[0]["lr"] = float(lr)
        set_grads(params, twins)
        ours.step()
        theirs.step()
    assert_equal(params, twins)


SCHEDULERS: list[Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = [
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=True),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
]


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers_drive_it_as_they_drive_torch(
    make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler], tensor_lr: bool
) -> None:
    params = make_params()
    twins = copies_of(params)
    ours = FusedAdam(params, lr=torch.tensor(0.1) if tensor_lr else 0.1)
    theirs = torch.optim.AdamW(
        twins, lr=torch.tensor(0.1) if tensor_lr else 0.1, weight_decay=0, fused=True
    )
    schedulers = [make(ours), make(theirs)]
    for _ in range(10):
        set_grads(params, twins)
        ours.step()
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-6)
