"""fully_shard without capture: the loops, methods and parameters that FSDP2's users know."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import graphfsdp
from ranks import on_ranks
from sharding_helpers import (
    adam,
    assert_equal_tensors,
    batches,
    full_parameters,
    make_net,
    my_part,
    shard,
)

NUM_STEPS = 5


def everything_between_steps(**options: Any) -> list[Tensor]:
    """Whatever may leave or find whole weights, before and after steps of the optimizer."""
    model: Any = make_net("optim_grads_params", **options)
    optim = adam(model)
    seen: list[Tensor] = []
    for batch in batches(NUM_STEPS):
        part = my_part(batch)
        seen.append(model(*part).detach())  # no backward pass follows, which would drop weights
        for half in range(2):
            model.set_is_last_backward(half == 1)
            loss = model(*(rows[half::2] for rows in part))
            with torch.no_grad():
                seen.append(model(*part))  # between a forward pass and its backward
            loss.backward()
        seen.append(model(*part).detach())
        optim.step()
        optim.zero_grad()
        seen.append(model(*part).detach())
        with torch.no_grad():
            next(model.parameters()).mul_(0.9)
        seen.append(model(*part).detach())
        seen += [value.full_tensor() for value in model.state_dict().values()]
        model.unshard()
        seen += [model(*part).detach(), *(param.detach().clone() for param in model.parameters())]
        model.reshard()
    return [*seen, *full_parameters(model).values()]


@on_ranks("ranks2")
def test_a_root_that_is_kept_is_never_older_than_its_shards() -> None:
    expected = everything_between_steps(reshard_after_forward=True)
    for before, after in ((3, 4), (4, 5)):  # the optimizer, and a write, have changed the weights
        assert not torch.equal(expected[before], expected[after])
    assert_equal_tensors(expected, everything_between_steps())
    assert_equal_tensors(expected, everything_between_steps(overlap=False))


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
@on_ranks("ranks2")
def test_an_optimizer_made_before_keeps_its_groups(name: str) -> None:
    results = []
    for first in (True, False):
        model = make_net(None if first else "optim_grads_params")
        optim = adam(model, name)
        params = optim.param_groups[0]["params"]
        others = [param for param in params if param.dim() <= 1]
        optim.param_groups[0]["params"] = [param for param in params if param.dim() > 1]
        optim.add_param_group({"params": others, "weight_decay": 0.0})
        numbers = [len(group["params"]) for group in optim.param_groups]
        if first:
            shard(model, "optim_grads_params")
        with graphfsdp.capture(model, optim) as step:
            for batch in batches(6):
                step(*my_part(batch))
        assert [len(group["params"]) for group in optim.param_groups] == numbers
        assert [group["weight_decay"] for group in optim.param_groups] == [0.1, 0.0]
        assert all(isinstance(p, DTensor) for g in optim.param_groups for p in g["params"])
        results.append(full_parameters(model))
    assert_equal_tensors(*results)
