"""Every optimizer beside a published implementation's recorded numbers."""

import json
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from graphfsdp.optim import FusedAdam, Muon

RECORDED = json.loads(
    (pathlib.Path(__file__).parents[1] / "references" / "optimizer_steps.json").read_text()
)
# What makes it, and how far a weight may be off: a few roundings of numbers below 4 in each step.
OPTIMIZERS: Mapping[str, tuple[Any, float]] = MappingProxyType(
    {
        "adamw": (FusedAdam, 1e-5),
        # Directions are bfloat16: an entry may be a 64th off at the end of the five iterations,
        # times lr, summed over lr's six steps, times the root of the shape's ratio.
        "muon": (Muon, 0.1 * 2.45 * 1.23 / 32),
    }
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_reference(device: torch.device, name: str) -> None:
    """Sharded ones take the steps of whole ones: test_mesh_optimizers.py."""
    case = RECORDED["cases"][name]
    make, bound = OPTIMIZERS[name]
    shapes = RECORDED["shapes"][: len(case["weights"]["0"])]
    params = [
        nn.Parameter(torch.tensor(values, device=device).view(shape))
        for values, shape in zip(RECORDED["start"], shapes, strict=False)
    ]
    optimizer = make(params, lr=RECORDED["lr"], **case["settings"])
    found = {}
    for step, grads in enumerate(RECORDED["grads"]):
        optimizer.param_groups[0]["lr"] = RECORDED["lr"] / (1 + step)
        optimizer.param_groups[0]["weight_decay"] = RECORDED["decay"] * step
        for param, values in zip(params, grads, strict=False):
            param.grad = torch.tensor(values, device=device).view(param.shape)
        optimizer.step()
        found[str(step)] = [param.detach().clone().cpu() for param in params]
    for step, expected in case["weights"].items():
        for weight, values in zip(found[step], expected, strict=True):
            wanted = torch.tensor(values).view(weight.shape)
            torch.testing.assert_close(weight, wanted, rtol=0, atol=bound)
