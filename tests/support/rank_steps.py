"""A small sharded model with its captured step, for ranks that fail and ranks that differ."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from counting_net import mean_square
from graphfsdp.optim import FusedAdam
from helpers import quick_garbage_collection
from ranks import rank_device

WIDTH = 4


def build(
    strategy: str,
    scope: str,
    *between: nn.Module,
    axes: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> tuple[Any, nn.Module, FusedAdam]:
    """``between``: modules behind the first layer; ``axes``: arguments of ``fully_shard``."""
    quick_garbage_collection()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), *between, nn.Dropout(0.2), nn.Linear(WIDTH, 3)]
    model = nn.Sequential(*layers).to(rank_device())
    graphfsdp.fully_shard(model[0], strategy=strategy, **axes)
    graphfsdp.fully_shard(model, strategy=strategy, **axes)
    optim = FusedAdam(model.parameters(), lr=1e-2)
    options = {"loss_fn": mean_square, "max_grad_norm": 0.5, "warmup_steps": 2, **options}
    return graphfsdp.capture(model, optim, scope=scope, **options), model, optim


def batch(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator).to(rank_device())
