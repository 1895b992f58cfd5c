"""Tests of collectives that others than graphfsdp issue inside the iteration."""

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
from ranks import RankPool
from sharding_helpers import Block, raises_on_rank


class AllReduces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(4)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.block(x).square().mean()
        total = loss.detach().clone()
        dist.all_reduce(total)
        out: Tensor = loss * (1 + total)
        return out


class Mean(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x).square().mean()
        return out


def foreign(kind: str) -> str:
    torch.manual_seed(0)
    model: nn.Module
    if kind == "ddp":
        model = Mean(DistributedDataParallel(Block(4)))
    elif kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = Mean(Block(4))
        torch_fully_shard(model.block, mesh=mesh)
        torch_fully_shard(model, mesh=mesh)
    else:
        model = AllReduces()
    params: Any = model.parameters()
    optim = torch.optim.AdamW(params, lr=torch.tensor(0.01), fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    if kind == "ddp":  # known before anything runs
        with raises_on_rank(ConfigError) as messages:
            graphfsdp.capture(model, optim)
        with graphfsdp.capture(model, optim, scope="none") as step:
            assert step(torch.ones(2, 4)).isfinite()
        return messages[0]
    with graphfsdp.capture(model, optim) as step:
        for index in range(4):
            x = torch.randn(2, 4, generator=generator)
            if index < 3:
                step(x)
                continue
            with raises_on_rank(CaptureError) as messages:
                step(x)
    (message,) = messages
    if kind == "all_reduce":  # the others' own state is in the middle of a backward pass
        with graphfsdp.capture(model, optim, scope="none") as step:
            assert step(torch.ones(2, 4)).isfinite()
    return message


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "all_reduce"])
def test_a_foreign_collective_is_refused_by_name(ranks2: RankPool, kind: str) -> None:
    for message in ranks2.run(foreign, kind):
        assert "Remedy" in message
        if kind == "fsdp2":
            assert "fsdp.all_gather_copy_in" in message
        elif kind == "ddp":
            assert "'block' is wrapped in DistributedDataParallel" in message
            assert "strategy='no_shard'" in message
        else:
            assert "c10d" in message
            assert "is a collective" in message
