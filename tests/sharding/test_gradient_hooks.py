"""Hooks of gradients on sharded parameters see what all ranks have reduced, in a graph too."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    Net,
    assert_equal_tensors,
    assert_trains_as_whole,
    batches,
    full_parameters,
    hybrid_mesh,
    make_net,
    my_part,
    num_steps_of,
    on_meta,
    replayed_as_eager,
    shard,
)


def hooked_net(strategy: str | None, *, meta: bool = False, **options: Any) -> nn.Module:
    """What its hooks do to a gradient is no sum over ranks, and differs in each element."""
    model = make_net(None if meta else strategy, dtype=torch.float64, **options)
    if meta:
        assert strategy is not None
        state = model.state_dict()
        model = shard(on_meta(lambda: Net().double()), strategy)
        model.to_empty(device=rank_device())
        model.load_state_dict(state)

    def halve(param: Any) -> None:
        param.grad.mul_(0.5)

    for param in model.parameters():
        if param.requires_grad:
            param.register_hook(lambda grad: torch.tanh(grad * 30))
            param.register_post_accumulate_grad_hook(halve)
    return model


@pytest.mark.parametrize(
    ("ranks", "strategy", "options"),
    [
        *(("ranks2", strategy, {}) for strategy in STRATEGIES),
        ("ranks2", "optim_grads_params", {"overlap": False}),
        *(("ranks2", strategy, {"meta": True}) for strategy in ("no_shard", "optim_grads_params")),
        ("ranks4", "optim_grads_params", {"outer_strategy": "no_shard"}),
        ("ranks4", "optim_grads_params", {"outer_strategy": "optim"}),
    ],
)
@on_ranks()
def test_hooks_see_what_all_ranks_have_reduced(strategy: str, options: dict[str, Any]) -> None:
    """As in one process, where each microbatch is reduced over all ranks, or there is but one."""
    num_steps = num_steps_of(strategy, "optim_grads_params")
    axes: dict[str, Any] = {"mesh": hybrid_mesh()} if "outer_strategy" in options else {}
    rows = slice(dist.get_rank(), None, dist.get_world_size())  # of each microbatch as many
    data = [[part[rows].to(rank_device()) for part in batch] for batch in batches(num_steps)]
    for microbatches in (1, 3):
        got = replayed_as_eager(
            partial(hooked_net, strategy, **axes, **options),
            num_steps=num_steps,
            data=data,
            microbatches=microbatches,
        )
        if microbatches == 1 or (strategy.startswith("optim_grads") and not axes):
            assert_trains_as_whole(got, whole=hooked_net(None), microbatches=microbatches)


def stepping_in_backward(model: Any, optimizers: Any, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch)
    loss.backward()
    return loss


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("ranks2")
def test_optimizers_that_step_in_backward_are_captured(strategy: str) -> None:
    runs = []
    for scope in ("none", "full_iteration"):
        model = make_net(strategy)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in params}

        def step(param: Any, optimizers: Any = optimizers) -> None:
            optimizers[param].step()
            param.grad = None

        for param in params:
            param.register_post_accumulate_grad_hook(step)
        options: Any = {"iteration": stepping_in_backward, "scope": scope}
        with graphfsdp.capture(model, [*optimizers.values()], **options) as captured:
            num_steps = num_steps_of(strategy, "optim_grads_params")
            losses = [captured(*my_part(batch)) for batch in batches(num_steps)]
            if scope != "none":
                assert captured.report().num_captures == 1
        assert losses[-1] != losses[0]
        runs.append([*losses, *full_parameters(model).values()])
    assert_equal_tensors(*runs)
