"""Tests of collectives that others than graphfsdp issue inside the iteration."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import graphfsdp
from counting_net import mean_square
from graphfsdp import CaptureError, ConfigError
from ranks import on_ranks
from sharding_helpers import Block, raises_on_rank


def all_reduced(model: nn.Module, x: Tensor) -> Tensor:
    loss = mean_square(model, x)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return loss * (1 + total)


def block() -> nn.Module:
    return nn.Sequential(Block(4))


def sharded_by_torch() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = block()
    for module in (*model.children(), model):
        torch_fully_shard(module, mesh=mesh)
    return model


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)


@pytest.mark.parametrize(
    ("make", "loss_fn", "words"),
    [
        (block, all_reduced, ("c10d", "is a collective", "Remedy")),
        (sharded_by_torch, mean_square, ("fsdp.all_gather_copy_in", "Remedy")),
    ],
)
@on_ranks("ranks2")
def test_a_foreign_collective_is_refused_by_name(
    make: Callable[[], nn.Module], loss_fn: Any, words: tuple[str, ...]
) -> None:
    torch.manual_seed(dist.get_rank())
    model = make()
    with graphfsdp.capture(model, optim := adamw(model), loss_fn=loss_fn) as step:
        for _ in range(3):
            step(torch.randn(2, 4))
        with raises_on_rank(CaptureError, *words):
            step(torch.randn(2, 4))
    if make is block:  # the other's own state is in the middle of a backward pass
        with graphfsdp.capture(model, optim, loss_fn=loss_fn, scope="none") as step:
            assert step(torch.ones(2, 4)).isfinite()


@on_ranks("ranks2")
def test_a_part_in_torchs_data_parallel_is_refused_before_anything_runs() -> None:
    model = nn.Sequential(DistributedDataParallel(Block(4)))
    words = ("'0' is wrapped in DistributedDataParallel", "strategy='no_shard'", "Remedy")
    with raises_on_rank(ConfigError, *words):
        graphfsdp.capture(model, adamw(model), loss_fn=mean_square)
    with graphfsdp.capture(model, adamw(model), loss_fn=mean_square, scope="none") as step:
        assert step(torch.ones(2, 4)).isfinite()
