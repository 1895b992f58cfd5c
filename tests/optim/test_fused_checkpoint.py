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
from adam_helpers import assert_equal, grad_of, make_groups, params_of, set_grads, take_steps
from graphfsdp.optim import FusedLion, FusedSGD, Muon
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer

Make = Callable[[nn.Linear], torch.optim.Optimizer]


def fused(make: Callable[..., DeviceOptimizer], remainders: bool, **numbers: Any) -> Make:
    return lambda module: make(
        module.parameters(),
        master_weights=True,
        store_param_remainders=remainders,
        skip_nonfinite=True,
        **numbers,
    )


def make_muon(module: nn.Linear) -> Muon:
    rest = {"params": [module.bias], "use_muon": False}
    return Muon(make_groups({"params": [module.weight]}, rest), lr=0.1)


SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
LION: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "maximize": True}
OPTIMIZERS: Mapping[str, Make] = MappingProxyType(
    {
        "sgd": fused(FusedSGD, False, **SGD, maximize=True),
        "sgd remainders": fused(FusedSGD, True, **SGD, maximize=True),
        "nesterov": fused(FusedSGD, False, **SGD, nesterov=True),
        "nesterov remainders": fused(FusedSGD, True, **SGD, nesterov=True),
        "lion": fused(FusedLion, False, **LION),
        "lion remainders": fused(FusedLion, True, **LION),
        "muon": make_muon,
    }
)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_checkpoint_resumes_bit_for_bit(name: str, has_stepped: bool, tmp_path: Path) -> None:
    whole = name == "muon"
    dtype = torch.float32 if whole else torch.bfloat16
    model, other = (nn.Linear(6, 4, dtype=dtype) for _ in range(2))
    source, target = OPTIMIZERS[name](model), OPTIMIZERS[name](other)
    for step in range(3):
        set_grads(params_of(source))
        if step == 1 and not whole:
            grad_of(model.weight)[0, 0] = math.nan
        source.step()
    if has_stepped:
        take_steps(1, target)
    graphfsdp.save(tmp_path, model, source, rng=False)
    graphfsdp.load(tmp_path, other, target)
    if isinstance(target, DeviceOptimizer):
        assert target.control.skipped_steps.item() == 1
    take_steps(3, source, target)
    assert_equal(list(model.parameters()), list(other.parameters()))
