"""graphfsdp.check of a sharded model: nothing changes on any rank, collectives are judged."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import HazardKind
from graphfsdp.optim import FusedAdam
from ranks import on_ranks
from sharding_helpers import (
    MAX_NORM,
    adam,
    assert_replayed,
    assert_same_training,
    batches,
    make_net,
    my_part,
    train,
)


@on_ranks("ranks2")
def test_a_check_leaves_a_sharded_model_alone() -> None:
    runs = []
    for checked in (False, True):
        model = make_net("optim_grads_params", dropout=0.2)
        optim = adam(model)
        if checked:
            batch = my_part(batches(1)[0])
            report = graphfsdp.check(
                model, optim, *batch, max_grad_norm=MAX_NORM, microbatches=3, ignore=["gradient"]
            )
            assert report.ok, str(report)
            assert report.num_ignored == 1  # a parameter that the net does not use
        runs.append(train(model, optim, microbatches=3))
    assert_same_training(*runs)
    assert_replayed(runs[1])


@on_ranks("ranks2")
def test_every_collective_that_cannot_be_recorded_is_listed_on_every_rank() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    before = [param.detach().clone() for param in model.parameters()]
    kept = torch.ones(4)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        dist.all_reduce(kept)  # in place, of a tensor from outside
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, {"rank": dist.get_rank()})
        dist.barrier()
        loss: Tensor = model(x * kept).square().mean()
        return loss

    report = graphfsdp.check(
        model, FusedAdam(model.parameters()), torch.ones(2, 4), loss_fn=loss_fn
    )
    assert torch.equal(kept, torch.ones(4))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    kinds = {hazard.kind for hazard in report.hazards}
    assert kinds == {HazardKind.COLLECTIVE}, str(report)
    lines = [hazard.source.text for hazard in report.hazards if hazard.source is not None]
    called = [f"dist.{name}" for name in ("all_reduce", "all_gather_object", "barrier")]
    assert [line.partition("(")[0] for line in lines] == called
    assert report.hazards[1].op == "torch.distributed.all_gather_object"
