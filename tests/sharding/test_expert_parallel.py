"""Experts on a mesh of their own: other experts along one axis, sharded along the other."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphfsdp
from graphfsdp import ConfigError
from parallel_models import (
    EP_AXES,
    NUM_EXPERTS,
    assert_trains_as_one,
    expert_parallel,
    part_of_axis,
    plain_model,
    train_parts,
    whole_batches,
)
from ranks import RankPool
from sharding_helpers import (
    Training,
    assert_replayed,
    assert_same_training,
    hybrid_mesh,
    my_part,
    raises_on_rank,
)


def both_scopes(strategy: str, microbatches: int) -> None:
    parts = [my_part(batch) for batch in whole_batches()]
    runs: list[Training] = []
    for scope in ("none", "full_iteration"):
        model = expert_parallel(strategy)
        runs.append(train_parts(model, parts, scope=scope, microbatches=microbatches))
    assert_same_training(*runs)
    assert_replayed(runs[1])
    plain = train_parts(plain_model("mixture"), whole_batches(), scope="none")
    world = dist.group.WORLD
    assert world is not None
    assert_trains_as_one(runs[1], plain, world)


@pytest.mark.parametrize(
    ("strategy", "microbatches"),
    [("no_shard", 1), ("optim_grads_params", 3)],
)
def test_experts_train_as_on_one_rank_and_replay_as_eager(
    ranks4: RankPool, strategy: str, microbatches: int
) -> None:
    ranks4.run(both_scopes, strategy, microbatches)


def refusals() -> list[str]:
    mesh = hybrid_mesh((2, 2), EP_AXES)
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.ones(()))
    linear = nn.Linear(2, 2)
    found = []
    for module, options in (
        (linear, {"expert_axis": "experts"}),
        (linear, {"expert_axis": "ep", "shard_axis": "ep"}),
        (linear, {"expert_axis": "ep", "mesh": mesh["ep"]}),
        (scalar, {"expert_axis": "ep"}),
    ):
        arguments: dict[str, Any] = {"mesh": mesh, **options}
        with raises_on_rank(ConfigError) as messages:
            graphfsdp.fully_shard(module, **arguments)
        found += messages
    uneven: Any = graphfsdp.fully_shard(
        nn.Linear(2, 2 + mesh.get_local_rank("ep")), mesh, expert_axis="ep"
    )
    with raises_on_rank(ConfigError) as messages:
        uneven.prepare_shards()
    return [*found, *messages]


def test_axes_and_experts_that_do_not_fit_are_refused_by_name(ranks4: RankPool) -> None:
    for unknown, twice, alone, scalar, uneven in ranks4.run(refusals):
        assert "the mesh has no axis 'experts'" in unknown
        assert "expert_axis 'ep' is an axis to shard over" in twice
        assert "the mesh has the expert axis 'ep' alone" in alone
        assert "parameter 'scale' has no dimension" in scalar
        assert "holds another model than rank" in uneven


def whole_shapes() -> tuple[Any, Any]:
    model = expert_parallel()
    weight = model.blocks[1].experts.weight
    return tuple(weight.shape), tuple(
        part_of_axis([weight], hybrid_mesh((2, 2), EP_AXES), "ep")[0].shape
    )


def test_a_parameter_of_experts_has_the_shape_of_all_of_them(ranks4: RankPool) -> None:
    for shape, part in ranks4.run(whole_shapes):
        assert shape == (NUM_EXPERTS, 8, 8)
        assert part[0] == NUM_EXPERTS // 2
