"""Checkpoints that do not fit are reported whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam


def trained(model: nn.Module, **options: Any) -> FusedAdam:
    optimizer = FusedAdam(model.parameters(), **options)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer


def bits(model: nn.Module, optimizer: FusedAdam) -> list[Tensor]:
    states = [t.clone() for state in optimizer.state.values() for t in state.values()]
    return [*(p.detach().clone() for p in model.parameters()), *states]


def test_everything_that_does_not_fit_is_listed_and_nothing_is_written(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2), "old": nn.Linear(1, 1)})
    graphfsdp.save(tmp_path, model, trained(model, amsgrad=True), rng=False)
    other = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(5, 2), "new": nn.Linear(1, 1)})
    optimizer = trained(other, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = bits(other, optimizer)
    with pytest.raises(graphfsdp.CheckpointMismatchError) as caught:
        graphfsdp.load(tmp_path, other, optimizer, objects={"lr": scheduler})
    text = str(caught.value)
    for expected in (
        "model: 'b.weight': saved [2, 4], here [2, 5]",
        "model: 'new.weight' is missing in the checkpoint",
        "model: 'new.bias' is missing in the checkpoint",
        "model: 'old.weight' is in the checkpoint, but not in the model",
        "optimizer: exp_avg of 'b.weight': saved [2, 4], here [2, 5]",
        "optimizer: 'new.bias' is in no parameter group of the saved optimizer",
        "optimizer: the checkpoint has a state of 'old.bias', which this one does not train",
        "objects: 'lr' is missing in the checkpoint",
        "nothing was loaded",
        "strict=False",
    ):
        assert expected in text, expected
    assert all(torch.equal(a, b) for a, b in zip(before, bits(other, optimizer), strict=True))
    loaded = graphfsdp.load(tmp_path, other, strict=False)
    assert "model: 'b.weight': saved [2, 4], here [2, 5]" in loaded.skipped
    assert torch.equal(other.get_parameter("a.weight"), model.get_parameter("a.weight"))
    assert torch.equal(other.get_parameter("b.weight"), before[2])


@pytest.mark.parametrize(
    ("saved", "here", "said"),
    [
        ({"amsgrad": True}, {}, "was saved with amsgrad=True"),
        ({"maximize": True}, {}, "was saved with maximize=True"),
        ({"bias_correction": False}, {}, "was saved with bias_correction=False"),
        ({"weight_decay": 0.1}, {"adam_w_mode": False}, "decoupled_weight_decay=True"),
    ],
)
def test_another_update_rule_is_reported_before_anything_is_written(
    saved: dict[str, Any], here: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)
    graphfsdp.save(tmp_path, model, trained(model, **saved), rng=False)
    other = nn.Linear(3, 2)
    optimizer = trained(other, **here)
    before = bits(other, optimizer)
    with pytest.raises(graphfsdp.CheckpointMismatchError, match=said):
        graphfsdp.load(tmp_path, other, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(other, optimizer), strict=True))


def test_other_groups_and_kinds_are_reported(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight]},
        {"params": [model.bias], "weight_decay": 0.5},
    ]
    graphfsdp.save(tmp_path, model, FusedAdam(groups), rng=False)
    other = nn.Linear(3, 2)
    with pytest.raises(graphfsdp.CheckpointMismatchError, match="in one parameter group here"):
        graphfsdp.load(tmp_path, other, FusedAdam(other.parameters()))
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(graphfsdp.CheckpointMismatchError, match="saved from FusedAdam, here a SGD"):
        graphfsdp.load(tmp_path, other, sgd)
    graphfsdp.save(tmp_path, model, rng=False)
    with pytest.raises(graphfsdp.CheckpointMismatchError, match="saved without one"):
        graphfsdp.load(tmp_path, other, sgd)


def test_groups_are_matched_by_names_not_by_order(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.5}]
    groups.append({"params": [model.bias], "lr": 0.25})
    graphfsdp.save(tmp_path, model, FusedAdam(groups), rng=False)
    turned: list[dict[str, Any]] = [{"params": [other.bias]}, {"params": [other.weight]}]
    optimizer = FusedAdam(turned)
    graphfsdp.load(tmp_path, other, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
