"""Units that run again in backward: equal numbers, and no more gathers."""

import pytest
import torch

from overlap_helpers import short_up_to
from ranks import on_ranks, rank_device
from recomputing_models import Recomputing
from sharding_helpers import (
    Training,
    adam,
    assert_replayed,
    assert_same_training,
    num_steps_of,
    shard,
    train,
)

# By name: whether the block, a segment of blocks or a part of a block runs again, and by whom;
# with how much dropout, which torch's own would draw anew.
WAYS = {
    "optim": (("block_torch", 0.0), ("segment_reentrant", 0.0)),
    "optim_grads_params": (
        *(("block_reentrant", 0.0), ("segment_torch", 0.0), ("part_torch", 0.0)),
        *(("block_selective", 0.0), ("part_selective", 0.0)),
        *(("part_reentrant", 0.0), ("block_ours", 0.3), ("part_ours", 0.3)),
    ),
}


def trained(way: str, strategy: str, dropout: float, scope: str) -> Training:
    torch.manual_seed(0)
    model = shard(Recomputing(way, dropout).to(rank_device()), strategy)
    return train(model, adam(model), scope=scope, num_steps=num_steps_of(strategy, "optim"))


def num_collectives(training: Training) -> dict[str, int]:
    counts = training.report.op_counts
    return {op: counts[f"graphfsdp.{op}.default"] for op in ("all_gather_", "reduce_scatter_")}


@pytest.mark.parametrize("strategy", WAYS)
@on_ranks("ranks2")
def test_recomputation_in_a_graph_changes_no_bit_and_gathers_no_more(strategy: str) -> None:
    """Compare with runs that keep all activations; at last one where small units go together."""
    with short_up_to(0):
        usual = {
            dropout: trained("none", strategy, dropout, "full_iteration")
            for dropout in {dropout for _, dropout in WAYS[strategy]}
        }
        for way, dropout in WAYS[strategy]:
            got = trained(way, strategy, dropout, "full_iteration")
            assert_same_training(usual[dropout], got)
            assert_replayed(got, num_steps_of(strategy, "optim"))
            assert num_collectives(got) == num_collectives(usual[dropout]), way
    assert_same_training(got, trained(way, strategy, dropout, "none"))
