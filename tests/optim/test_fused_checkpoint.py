"""Optimizers beside FusedAdam in checkpoints."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
from adam_helpers import assert_equal, make_groups, set_grads
from graphfsdp.optim import Adafactor, FusedLion, FusedSGD, Muon
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer

OPTIMIZERS: Mapping[str, tuple[Callable[..., DeviceOptimizer], dict[str, Any]]] = MappingProxyType(
    {
        "sgd": (FusedSGD, {"lr": 0.05, "momentum": 0.9, "maximize": True}),
        "nesterov": (FusedSGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        "lion": (FusedLion, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    }
)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("remainders", [False, True])
def test_a_checkpoint_resumes_bit_for_bit(name: str, remainders: bool, tmp_path: Path) -> None:
    make, numbers = OPTIMIZERS[name]
    settings: dict[str, Any] = numbers | {
        "master_weights": True,
        "store_param_remainders": remainders,
        "skip_nonfinite": True,
    }
    model, other = (nn.Linear(6, 4, dtype=torch.bfloat16) for _ in range(2))
    source = make(model.parameters(), **settings)
    target = make(other.parameters(), **settings)
    params, twins = list(model.parameters()), list(other.parameters())
    for step in range(3):
        set_grads(params)
        if step == 1:
            assert params[0].grad is not None
            params[0].grad[0, 0] = math.nan
        source.step()
    graphfsdp.save(tmp_path, model, source, rng=False)
    graphfsdp.load(tmp_path, other, target)
    assert target.control.skipped_steps.item() == 1
    for _ in range(2):
        set_grads(params, twins)
        source.step()
        target.step()
    assert_equal(params, twins)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_checkpoint_of_whole_tensors_resumes_bit_for_bit(
    name: str, has_stepped: bool, tmp_path: Path
) -> None:
    def make(module: nn.Linear) -> torch.optim.Optimizer:
        if name == "adafactor":
            return Adafactor(module.parameters(), lr=0.1)
        rest = {"params": [module.bias], "use_muon": False}
        return Muon(make_groups({"params": [module.weight]}, rest), lr=0.1)

    model, other = nn.Linear(6, 4), nn.Linear(6, 4)
    params, twins = list(model.parameters()), list(other.parameters())
    source, target = make(model), make(other)
    set_grads(params)
    source.step()
    if has_stepped:
        set_grads(twins)
        target.step()
    graphfsdp.save(tmp_path, model, source, rng=False)
    graphfsdp.load(tmp_path, other, target)
    for _ in range(3):
        set_grads(params, twins)
        source.step()
        target.step()
    assert_equal(params, twins)


def test_a_checkpoint_of_another_rule_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    model = nn.Linear(6, 4)
    source = FusedSGD(model.parameters(), momentum=0.9, nesterov=True)
    set_grads(list(model.parameters()))
    source.step()
    graphfsdp.save(tmp_path, model, source, rng=False)
    before = model.weight.detach().clone()
    with pytest.raises(graphfsdp.CheckpointMismatchError, match="saved with nesterov=True"):
        graphfsdp.load(tmp_path, model, FusedSGD(model.parameters(), momentum=0.9))
    with pytest.raises(graphfsdp.CheckpointMismatchError, match="from FusedSGD, here a FusedLion"):
        graphfsdp.load(tmp_path, model, FusedLion(model.parameters()))
    assert torch.equal(model.weight, before)
