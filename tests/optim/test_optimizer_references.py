"""Every optimizer beside a published implementation's recorded numbers, whole and sharded."""

import json
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from graphfsdp.optim import FusedAdam, FusedLion, FusedSGD, Muon
from ranks import RankPool

RECORDED = json.loads(
    (pathlib.Path(__file__).parents[1] / "references" / "optimizer_steps.json").read_text()
)
# What makes it, and how far a weight may be off: a few roundings of numbers below 4 in each step.
OPTIMIZERS: Mapping[str, tuple[Any, float]] = MappingProxyType(
    {
        "sgd": (FusedSGD, 1e-5),
        "adamw": (FusedAdam, 1e-5),
        "lion": (FusedLion, 1e-5),
        # Directions are bfloat16: an entry may be a 64th off at the end of the five iterations,
        # times lr, summed over lr's six steps, times the root of the shape's ratio.
        "muon": (Muon, 0.1 * 2.45 * 1.23 / 32),
    }
)


def weights_after(name: str, device: str, sharded: bool) -> dict[str, list[Tensor]]:
    case = RECORDED["cases"][name]
    shapes = RECORDED["shapes"][: len(case["weights"]["0"])]
    mesh = init_device_mesh(device, (dist.get_world_size(),)) if sharded else None

    def tensor_of(values: list[float], shape: list[int]) -> Tensor:
        whole = torch.tensor(values, device=device).view(shape)
        return whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])

    params: list[Any] = [
        nn.Parameter(tensor_of(values, shape))
        for values, shape in zip(RECORDED["start"], shapes, strict=False)
    ]
    optimizer: Any = OPTIMIZERS[name][0](params, lr=RECORDED["lr"], **case["settings"])
    found = {}
    for step, grads in enumerate(RECORDED["grads"]):
        optimizer.param_groups[0]["lr"] = RECORDED["lr"] / (1 + step)
        optimizer.param_groups[0]["weight_decay"] = RECORDED["decay"] * step
        for param, values, shape in zip(params, grads, shapes, strict=False):
            param.grad = tensor_of(values, shape)
        optimizer.step()
        weights = [param.detach() for param in params]
        whole = [w.full_tensor() if sharded else w for w in weights]
        found[str(step)] = [weight.clone().cpu() for weight in whole]
    return found


def assert_recorded(name: str, found: dict[str, list[Tensor]]) -> None:
    for step, expected in RECORDED["cases"][name]["weights"].items():
        for weight, values in zip(found[step], expected, strict=True):
            wanted = torch.tensor(values).view(weight.shape)
            torch.testing.assert_close(weight, wanted, rtol=0, atol=OPTIMIZERS[name][1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_reference(device: torch.device, name: str) -> None:
    assert_recorded(name, weights_after(name, device.type, False))


def all_sharded() -> dict[str, dict[str, list[Tensor]]]:
    return {name: weights_after(name, "cpu", True) for name in OPTIMIZERS}


def test_sharded_steps_are_those_of_the_reference(ranks2: RankPool) -> None:
    for found in ranks2.run(all_sharded):
        for name, weights in found.items():
            assert_recorded(name, weights)
