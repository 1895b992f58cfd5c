"""FusedSGD and FusedLion on two ranks: as on one, and captured as eager."""

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

import graphfsdp
from graphfsdp.optim import FusedLion, FusedSGD
from graphfsdp.optim.device_optimizer import DeviceOptimizer
from helpers import quick_garbage_collection
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


def _train(name: str, scope: str) -> tuple[list[list[Tensor]], float]:
    """Return whole weights after each call, and the number of skipped steps."""
    quick_garbage_collection()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3))
    graphfsdp.fully_shard(model[0])
    graphfsdp.fully_shard(model)
    make, settings = OPTIMIZERS[name]
    optimizer = make(model.parameters(), skip_nonfinite=True, max_grad_norm=1.0, **settings)

    def loss_fn(module: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = module(x).square().mean()
        return loss

    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    with graphfsdp.capture(model, optimizer, scope=scope, loss_fn=loss_fn) as step:
        for index in range(14):
            x = torch.randn(5, 6, generator=generator)
            step(x * math.inf if index == 7 and dist.get_rank() == 1 else x)
            group = optimizer.param_groups[0]
            group["lr"], group["weight_decay"] = settings["lr"] / (index + 1), 0.01 * index
            found.append([p.detach().full_tensor().clone() for p in model.parameters()])  # type: ignore[attr-defined]
    return found, optimizer.control.skipped_steps.item()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sharded_replay_equals_the_eager_step(ranks2: RankPool, name: str) -> None:
    expected = ranks2.run(_train, name, "none")
    found = ranks2.run(_train, name, "full_iteration")
    for (weights, skipped), (others, other_skipped) in zip(found, expected, strict=True):
        assert skipped == other_skipped == 1
        for index, (one, other) in enumerate(zip(weights, others, strict=True)):
            for left, right in zip(one, other, strict=True):
                assert torch.equal(left, right), f"after call {index}"
    assert not torch.equal(found[0][0][8][0], found[0][0][-1][0])
