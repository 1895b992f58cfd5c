"""graphfsdp.check of a sharded model: nothing changes on any rank, collectives are judged."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import HazardKind
from graphfsdp.optim import FusedAdam
from ranks import RankPool
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


def trains_the_same_after_a_check(strategy: str) -> None:
    runs = []
    for checked in (False, True):
        model = make_net(strategy, dropout=0.2)
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


def test_a_check_leaves_a_sharded_model_alone(ranks2: RankPool) -> None:
    ranks2.run(trains_the_same_after_a_check, "optim_grads_params")


def listed_collectives() -> str:
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
    return json.dumps([(h.op, h.source and h.source.text) for h in report.hazards])


def test_every_collective_that_cannot_be_recorded_is_listed_on_every_rank(
    ranks2: RankPool,
) -> None:
    results = [json.loads(text) for text in ranks2.run(listed_collectives)]
    assert results[0] == results[1]
    assert [text.partition("(")[0] for _, text in results[0]] == [
        "dist.all_reduce",
        "dist.all_gather_object",
        "dist.barrier",
    ]
    assert results[0][1][0] == "torch.distributed.all_gather_object"
