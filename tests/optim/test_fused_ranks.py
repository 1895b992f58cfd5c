"""FusedSGD and FusedLion on two ranks: as on one."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from graphfsdp.optim import FusedLion, FusedSGD
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from ranks import RankPool

OPTIMIZERS: Mapping[str, tuple[Callable[..., DeviceOptimizer], dict[str, Any]]] = MappingProxyType(
    {
        "sgd": (FusedSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
        "nesterov": (FusedSGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        "lion": (FusedLion, {"lr": 0.01, "weight_decay": 0.1}),
    }
)
SHAPES = [(7, 3), (5,), (1, 4)]  # with rows that do not divide: a rank holds less, or nothing
BAD_STEP = 1


def _step_by_hand(name: str, sharded: bool) -> tuple[list[Tensor], list[Tensor], float]:
    """Return whole weights, whole momenta, and the number of skipped steps."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if sharded else tensor

    params = [nn.Parameter(place(torch.randn(shape))) for shape in SHAPES]
    make, settings = OPTIMIZERS[name]
    optimizer = make(params, skip_nonfinite=True, max_grad_norm=0.5, **settings)
    for step in range(5):
        for index, param in enumerate(params):
            grad = torch.randn(SHAPES[index])
            if step == BAD_STEP and index == 0:
                grad[6, 2] = math.nan  # on the last rank alone
            param.grad = place(grad)
        optimizer.step()
    moment = optimizer.settings.moments[0]
    weights: list[Any] = [param.detach() for param in params]
    momenta: list[Any] = [optimizer.state[param][moment] for param in params]
    if sharded:
        weights, momenta = ([t.full_tensor() for t in part] for part in (weights, momenta))
    return weights, momenta, optimizer.control.skipped_steps.item()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_step_as_whole_parameters(ranks2: RankPool, name: str) -> None:
    weights, momenta, skipped = ranks2.run(_step_by_hand, name, False)[0]
    assert skipped == 1
    for found_weights, found_momenta, found_skipped in ranks2.run(_step_by_hand, name, True):
        assert found_skipped == 1
        pairs = zip([*found_weights, *found_momenta], [*weights, *momenta], strict=True)
        for left, right in pairs:
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
