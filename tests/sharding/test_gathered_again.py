"""Units that run again in backward, and weights that few ranks keep for it: equal numbers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlap_helpers import Watch, short_up_to
from ranks import on_ranks, rank_device
from recomputing_models import Recomputing
from sharding_helpers import (
    FEW_STEPS,
    Training,
    adam,
    assert_replayed,
    assert_same_training,
    batches,
    buffers,
    make_net,
    my_part,
    num_steps_of,
    shard,
    train,
)


@on_ranks("ranks4")
def test_passes_that_run_again_or_several_times() -> None:
    for way in ("block_torch", "part_reentrant", "block_ours"):
        runs = []
        for few in (True, 2):
            torch.manual_seed(0)
            model: Any = Recomputing(way, 0.0).to(rank_device())
            shard(model, "optim_grads_params", reshard_after_forward=few)
            runs.append(train(model, adam(model), num_steps=FEW_STEPS))
        assert_same_training(*runs)
    grads = []
    for few in (True, 2):
        model = make_net("optim_grads_params", reshard_after_forward=few)
        parts = [my_part(batch) for batch in batches(2)]
        loss: Tensor = model(*parts[0]) * model(*parts[1])  # each unit twice in one pass
        with torch.no_grad():
            model(*parts[1])
        loss.backward()
        loss = model(*parts[1])
        model.set_reshard_after_forward(True)  # no longer to few
        loss.backward()
        found: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
        grads.append([grad.full_tensor() for grad in found])
    assert all(map(torch.equal, *grads))


@on_ranks("ranks4")
def test_backward_gathers_from_two_ranks() -> None:
    """Forward gathers from all; each rank keeps half of the whole weights between."""
    sizes: list[int] = []

    model: Any = make_net("optim_grads_params", reshard_after_forward=2)
    cut = [each for each in buffers(model) if each.sharded and each.layout.total_numel]
    watch = Watch("all_gather", lambda whole, part: sizes.append(whole.numel() // part.numel()))
    with watch:
        loss = model(*my_part(batches(1)[0]))
    assert sizes == [4] * len(cut)
    for buffer in cut:
        assert buffer.copy is None
        kept = buffer._part
        assert kept is not None
        assert 2 * kept.numel() == buffer.layout.total_numel
        assert buffer.few_ranks is not None
        ranks = dist.get_process_group_ranks(buffer.few_ranks)
        assert ranks == [0, 1] or ranks == [2, 3]
        assert dist.get_rank() in ranks
    with watch:
        loss.backward()
    assert set(sizes[len(cut) :]) == {2}
    assert all(buffer._part is None for buffer in buffers(model))


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
