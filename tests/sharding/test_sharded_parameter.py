"""Gradients of sharded parameters that fully_shard would lose are refused by name."""

from typing import Any

import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import mean_square
from graphfsdp import ConfigError
from graphfsdp.optim import FusedAdam
from ranks import on_ranks, rank_device
from sharding_helpers import STRATEGIES, on_meta, raises_on_rank

WIDTH = 8


def make() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(inner, nn.Linear(WIDTH, 1)).to(rank_device())


def shard(model: nn.Sequential, strategy: str) -> nn.Sequential:
    graphfsdp.fully_shard(model[0], strategy=strategy)
    graphfsdp.fully_shard(model, strategy=strategy)
    return model


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    """Add a penalty on all weights, as people write it without sharding."""
    loss = mean_square(model, x)
    for param in model.parameters():
        whole: Any = param.square().sum()
        loss = loss + 0.1 * whole.full_tensor()
    return loss


@on_ranks("ranks2")
def test_a_penalty_on_sharded_parameters_is_refused() -> None:
    said = "has reached the sharded parameter", "weight_decay for an L2 penalty"
    x = torch.ones(2, WIDTH, device=rank_device())
    for strategy in STRATEGIES:
        model = shard(make(), strategy)
        with raises_on_rank(ConfigError, *said):
            penalized(model, x).backward()
        optimizer = FusedAdam(model.parameters())
        with (
            graphfsdp.capture(model, optimizer, loss_fn=penalized) as step,
            raises_on_rank(ConfigError, *said),
        ):
            step(x)
        with graphfsdp.capture(model, optimizer, loss_fn=mean_square) as step:
            for _ in range(5):  # the model can be trained nevertheless
                step(x)


class Penalized(nn.Linear):
    """Computes the penalty in its own forward, as the remedy says."""

    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.weight.square().sum()
        return super().forward(x)


def own_penalty(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = mean_square(model, x) + 0.1 * model[0].penalty
    return loss


@on_ranks("ranks2")
def test_a_penalty_that_a_module_computes_is_right() -> None:
    x = torch.ones(2, WIDTH, device=rank_device(), dtype=torch.float64)
    grads = []
    for strategy in (None, *STRATEGIES):
        torch.manual_seed(0)
        model = nn.Sequential(Penalized(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        model.to(rank_device(), torch.float64)
        if strategy is not None:
            shard(model, strategy)
        own_penalty(model, x).backward()
        found: list[Any] = [param.grad for param in model.parameters()]
        grads.append([grad if strategy is None else grad.full_tensor() for grad in found])
    for sharded in grads[1:]:
        for got, expected in zip(sharded, grads[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@on_ranks("ranks2")
def test_models_from_the_meta_device_are_watched_too() -> None:
    model = on_meta(lambda: nn.Linear(WIDTH, 1))
    graphfsdp.fully_shard(model)
    graphfsdp.materialize(model, rank_device())
    loss = penalized(model, torch.ones(2, WIDTH, device=rank_device()))
    with raises_on_rank(ConfigError, "has reached the sharded parameter"):
        loss.backward()
