"""What two-axis meshes refuse, and failures that ranks hear of along both axes."""

import re
from typing import Any

import torch
import torch.distributed as dist

import graphfsdp
from graphfsdp import ConfigError
from helpers import assert_same_state, set_lr, snapshot
from ranks import on_ranks
from sharding_helpers import (
    HYBRID_AXES,
    MAX_NORM,
    adam,
    batches,
    hybrid_mesh,
    hybrid_net,
    learning_rate,
    my_part,
    raises_on_rank,
    train,
)


@on_ranks("ranks4")
def test_meshes_and_options_that_do_not_fit_are_refused_by_name() -> None:
    mesh, deep = hybrid_mesh(), hybrid_mesh((1, 2, 2), ("pp", *HYBRID_AXES))
    inside, outside = "dp_shard", "dp_replicate"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"mesh": deep}, "cannot tell which of a mesh of shape (1, 2, 2) with the axes ('pp',"),
        ({"mesh": deep, "shard_axis": "dp"}, "the mesh has no axis 'dp'; it has a mesh"),
        (
            {"mesh": deep, "replicate_axis": outside},
            "replicate_axis='dp_replicate' needs a shard_axis",
        ),
        (
            {"mesh": deep, "shard_axis": outside, "replicate_axis": inside},
            "replicate_axis 'dp_shard' must come before shard_axis 'dp_replicate'",
        ),
        ({"mesh": deep, "shard_axis": inside, "replicate_axis": inside}, "are both 'dp_shard'"),
        (
            {"mesh": mesh, "strategy": "no_shard", "outer_strategy": "optim"},
            "outer_strategy='optim' with strategy='no_shard'",
        ),
        (
            {"mesh": mesh, "outer_strategy": "optim_grads"},
            "outer_strategy must be 'no_shard' or 'optim', got 'optim_grads'",
        ),
        ({"mesh": mesh, "outer_strategy": "half"}, "unknown sharding strategy 'half'"),
        ({"mesh": mesh[inside], "outer_strategy": "optim"}, "over a second mesh axis"),
        ({"outer_strategy": "optim"}, "over a second mesh axis"),
    ]
    linear = torch.nn.Linear(2, 2)
    for options, words in refused:
        with raises_on_rank(ConfigError, words):
            graphfsdp.fully_shard(linear, **options)
    assert all(type(param) is torch.nn.Parameter for param in linear.parameters())
    wrapped: Any = graphfsdp.fully_shard(linear, deep, shard_axis=inside, replicate_axis=outside)
    assert wrapped.weight.device_mesh.mesh_dim_names == HYBRID_AXES


@on_ranks("ranks4")
def test_another_model_on_one_rank_is_told_to_all() -> None:
    """Rank 3 alone: rank 0 shares no group with it."""
    width = 6 if dist.get_rank() == 3 else 4
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, width))
    graphfsdp.fully_shard(model, hybrid_mesh())
    with raises_on_rank(ConfigError, "rank 3 holds another model than rank"):
        model.prepare_shards()


class LateError(Exception):
    """An error of a user, after all collectives of the iteration."""


@on_ranks("ranks4")
def test_a_failed_capture_is_told_to_ranks_that_share_no_group() -> None:
    """In the optimizer's step hook of rank 3, in a warm-up and in the capture."""
    plain = hybrid_net("optim_grads_params", "optim")
    expected = train(plain, adam(plain), scope="none", num_steps=5)
    model = hybrid_net("optim_grads_params", "optim")
    optimizer = adam(model)
    fails = [False]

    def hook(*args: object) -> None:
        if fails[0] and dist.get_rank() == 3:
            raise LateError("of rank 3")

    optimizer.register_step_post_hook(hook)
    found = []
    losses = []
    with graphfsdp.capture(model, optimizer, warmup_steps=2, max_grad_norm=MAX_NORM) as step:
        for index, batch in enumerate(batches(5)):
            set_lr(optimizer, learning_rate(index))
            if index in (1, 2):
                before = snapshot(model, optimizer)
                fails[0] = True
                with raises_on_rank(Exception) as messages:
                    step(*my_part(batch))
                fails[0] = False
                assert_same_state(before, snapshot(model, optimizer), f"call {index}")
                found += messages
            losses.append(step(*my_part(batch)))
        assert step.report().num_captures == 1
    assert all(map(torch.equal, losses, expected.losses))
    assert len(found) == 2
    for message in found:
        if dist.get_rank() == 3:
            assert message == "of rank 3"
        else:
            assert re.search(r"rank 3 of 4 failed in iteration \d: LateError: of rank 3", message)
            assert "no rank keeps this iteration" in message
