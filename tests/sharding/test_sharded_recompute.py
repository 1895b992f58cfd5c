"""Activation recomputation around and inside units: equal numbers, and no gather more."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphfsdp
from helpers import NUM_STEPS
from ranks import on_ranks, rank_device
from sharding_helpers import (
    Training,
    adam,
    assert_replayed,
    assert_same_training,
    shard,
    train,
)

# By name: whether the block, a segment of blocks or a part of a block runs again, and by whom;
# with how much dropout, which torch's own would draw anew.
WAYS = {
    "optim": (("block_torch", 0.0), ("part_torch", 0.0)),
    "optim_grads": (("part_reentrant", 0.0),),
    "optim_grads_params": (
        *(("block_torch", 0.0), ("part_torch", 0.0)),
        *(("block_reentrant", 0.0), ("segment_reentrant", 0.0), ("segment_torch", 0.0)),
        *(("part_reentrant", 0.0), ("block_ours", 0.3), ("part_ours", 0.3)),
    ),
}


def again(way: str, function: Any, *args: Tensor) -> Any:
    if not torch.is_grad_enabled():
        return function(*args)
    if way.endswith("ours"):
        return graphfsdp.recompute(function, *args)
    # It would set the state of a generator otherwise, which no graph can.
    reentrant = way.endswith("reentrant")
    return checkpoint(function, *args, use_reentrant=reentrant, preserve_rng_state=False)


class Layer(nn.Module):
    """Two linear layers, dropout, and a parameter that belongs to the block itself."""

    def __init__(self, way: str, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.gain = nn.Parameter(torch.empty(8))
        self.dropout = nn.Dropout(dropout)
        self.way = way
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.5)

    def part(self, x: Tensor) -> Tensor:
        # The block's own parameter comes first: before a module says that it is called again.
        out: Tensor = self.dropout(self.down(torch.tanh(self.up(self.gain * x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + (again(self.way, self.part, x) if "part" in self.way else self.part(x))
        return out


class Recomputing(nn.Module):
    def __init__(self, way: str, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList([Layer(way, dropout) for _ in range(2)])
        self.head = nn.Linear(8, 17)
        self.way = way

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if "segment" in self.way:
            x = again(self.way, self.run, x)
        elif "block" in self.way:
            for block in self.blocks:
                x = again(self.way, block, x)
        else:
            x = self.run(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def trained(way: str, strategy: str, dropout: float, scope: str) -> Training:
    torch.manual_seed(0)
    model = shard(Recomputing(way, dropout).to(rank_device()), strategy)
    return train(model, adam(model), scope=scope, num_steps=NUM_STEPS)


def num_collectives(training: Training) -> dict[str, int]:
    assert training.report is not None
    counts = training.report.op_counts
    return {op: counts[f"graphfsdp.{op}.default"] for op in ("all_gather_", "reduce_scatter_")}


@pytest.mark.parametrize("strategy", WAYS)
@on_ranks("ranks2")
def test_recomputation_in_a_graph_changes_no_bit_and_gathers_no_more(strategy: str) -> None:
    """Compare with runs that keep all activations."""
    usual = {
        dropout: trained("none", strategy, dropout, "full_iteration")
        for dropout in {dropout for _, dropout in WAYS[strategy]}
    }
    for way, dropout in WAYS[strategy]:
        got = trained(way, strategy, dropout, "full_iteration")
        assert_same_training(usual[dropout], got)
        assert_replayed(got)
        assert num_collectives(got) == num_collectives(usual[dropout]), way
    assert_same_training(got, trained(way, strategy, dropout, "none"))
