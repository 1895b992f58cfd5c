"""`reshard_after_forward=2` of four ranks: two keep what forward has gathered, for backward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collectives import all_gather_
from ranks import on_ranks, rank_device
from recomputing_models import Recomputing
from sharding_helpers import (
    FEW_STEPS,
    adam,
    assert_same_training,
    batches,
    buffers,
    make_net,
    my_part,
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
def test_backward_gathers_from_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward gathers from all; each rank keeps half of the whole weights between."""
    sizes: list[int] = []

    def note(*args: Any, **options: Any) -> None:
        sizes.append(args[2].size())
        all_gather_(*args, **options)

    monkeypatch.setattr("graphfsdp.sharding.buffer.all_gather_", note)
    model: Any = make_net("optim_grads_params", reshard_after_forward=2)
    cut = [each for each in buffers(model) if each.sharded and each.layout.total_numel]
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
    loss.backward()
    assert set(sizes[len(cut) :]) == {2}
    assert all(buffer._part is None for buffer in buffers(model))
