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
from graphfsdp import CaptureError, ConfigError
from ranks import on_ranks
from sharding_helpers import Block, raises_on_rank


class Mean(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x).square().mean()
        return out


class AllReduces(Mean):
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return loss * (1 + total)


def all_reduces() -> nn.Module:
    return AllReduces(Block(4))


def sharded_by_torch() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Mean(Block(4))
    torch_fully_shard(model.block, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    return model


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (all_reduces, ("c10d", "is a collective", "Remedy")),
        (sharded_by_torch, ("fsdp.all_gather_copy_in", "Remedy")),
    ],
)
@on_ranks("ranks2")
def test_a_foreign_collective_is_refused_by_name(
    make: Callable[[], nn.Module], words: tuple[str, ...]
) -> None:
    torch.manual_seed(dist.get_rank())
    model = make()
    with graphfsdp.capture(model, optim := adamw(model)) as step:
        for _ in range(3):
            step(torch.randn(2, 4))
        with raises_on_rank(CaptureError, *words):
            step(torch.randn(2, 4))
    if make is all_reduces:  # the other's own state is in the middle of a backward pass
        with graphfsdp.capture(model, optim, scope="none") as step:
            assert step(torch.ones(2, 4)).isfinite()


@on_ranks("ranks2")
def test_a_part_in_torchs_data_parallel_is_refused_before_anything_runs() -> None:
    model = Mean(DistributedDataParallel(Block(4)))
    words = ("'block' is wrapped in DistributedDataParallel", "strategy='no_shard'", "Remedy")
    with raises_on_rank(ConfigError, *words):
        graphfsdp.capture(model, adamw(model))
    with graphfsdp.capture(model, adamw(model), scope="none") as step:
        assert step(torch.ones(2, 4)).isfinite()
