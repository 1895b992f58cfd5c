"""What FSDP2's users do every day, inside a captured iteration: replayed as it runs eagerly."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import graphfsdp
from counting_net import mean_square
from everyday_scripts import Tower
from ranks import on_ranks, rank_device
from sharding_helpers import (
    assert_equal_tensors,
    full_gradients,
    full_parameters,
    my_part,
    replayed_as_eager,
)

NUM_CAPTURED = 8
# One that reduces at last, and one that reduces each time and gathers.
CAPTURED = pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])


def tower(strategy: str) -> Any:
    torch.manual_seed(0)
    model = Tower().to(rank_device())
    for block in model.blocks:
        graphfsdp.fully_shard(block, strategy=strategy)
    return graphfsdp.fully_shard(model, strategy=strategy)


def inputs(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + index)
    (part,) = my_part((torch.randn(8, 8, generator=generator),))
    return part


def freezing_run(strategy: str, scope: str) -> dict[str, Tensor]:
    model = tower(strategy)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model.blocks[1].requires_grad_(False)
    options: Any = {"scope": scope, "on_change": "recapture", "warmup_steps": 1}
    with graphfsdp.capture(model, optim, loss_fn=mean_square, **options) as step:
        for index in range(12):
            if index == 4:
                model.blocks.requires_grad_(True)
                model.blocks[0][0].requires_grad_(False)
            elif index == 8:
                model.requires_grad_(False)
                model.blocks[2].requires_grad_(True)
            step(inputs(index))
        if scope != "none":
            assert step.report().num_captures == 3
    return full_parameters(model)


@CAPTURED
@on_ranks("ranks2")
def test_a_captured_step_follows_requires_grad(strategy: str) -> None:
    assert_equal_tensors(*(freezing_run(strategy, scope) for scope in ("none", "full_iteration")))


def unshards(model: Any, optim: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        block.unshard()
    loss = mean_square(model, x)
    loss.backward()
    optim.step()
    return loss


def skips_a_unit_at_last(model: Any, optim: Any, x: Tensor) -> Tensor:
    with model.no_sync():
        first = mean_square(model, x[::2])
        first.backward()
    last = model(x[1::2], skipped=(0, 2)).square().mean()
    last.backward()
    optim.step()
    total: Tensor = first + last
    return total


@pytest.mark.parametrize("iteration", [unshards, skips_a_unit_at_last])
@CAPTURED
@on_ranks("ranks2")
def test_an_iteration_with_words_of_fsdp2(strategy: str, iteration: Callable[..., Any]) -> None:
    data = [(inputs(index),) for index in range(NUM_CAPTURED)]
    options: Any = {"iteration": iteration, "max_grad_norm": None, "data": data}
    got = replayed_as_eager(lambda: tower(strategy), num_steps=NUM_CAPTURED, **options)
    start = full_parameters(tower(strategy))
    assert not any(torch.equal(value, start[name]) for name, value in got.params.items())


def returning_iteration(model: Any, optim: Any, x: Tensor) -> dict[str, Any]:
    optim.zero_grad()
    loss = mean_square(model, x)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optim.step()
    return {"norm": norm, "loss": loss, "grad": model.head.weight.grad, "nothing": None}


def returned(strategy: str, scope: str) -> list[Tensor]:
    """Also what lies unsharded in front of each call."""
    model = tower(strategy)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"scope": scope, "iteration": returning_iteration}
    found: list[Tensor] = []
    model.unshard()
    with graphfsdp.capture(model, optim, **options) as step:
        for index in range(NUM_CAPTURED):
            model.blocks[index % 3].unshard()
            kept = step(inputs(index))
            assert kept["nothing"] is None
            assert isinstance(kept["norm"], DTensor)
            found += [kept["norm"].full_tensor(), kept["loss"], kept["grad"].full_tensor()]
    return [*found, *full_parameters(model).values()]


@CAPTURED
@on_ranks("ranks2")
def test_a_captured_iteration_returns_dtensors(strategy: str) -> None:
    assert_equal_tensors(*(returned(strategy, scope) for scope in ("none", "full_iteration")))


def accumulated(strategy: str, *, by_hand: bool) -> list[Tensor]:
    """Train with two backward passes a step, whose gradients are reduced by hand, or by the last.

    By hand, one strategy keeps them since no pass is the last one, the other since it is told to.
    """
    model = tower(strategy)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_manual_backward_finalization(by_hand)
    found: list[Tensor] = []
    for index in range(4):
        model.set_requires_gradient_sync(strategy == "optim" if by_hand else index % 2 == 1)
        mean_square(model, inputs(index)).backward()
        if index % 2 == 0:
            continue
        if by_hand:
            assert all(param.grad is None for param in model.parameters())
            model.blocks[0].unshard()
            model.finalize_backward(async_op=True).wait()
            assert isinstance(model.blocks[0][0].weight, DTensor)  # resharded
        found += full_gradients(model).values()
        optim.step()
        optim.zero_grad()
    return [*found, *full_parameters(model).values()]


@CAPTURED
@on_ranks("ranks2")
def test_backward_passes_are_finalized_by_hand(strategy: str) -> None:
    runs = [accumulated(strategy, by_hand=by_hand) for by_hand in (False, True)]
    assert len(runs[0]) == 3 * len(list(tower(strategy).parameters()))
    assert_equal_tensors(*runs)


@on_ranks("ranks1")
def test_what_comes_waits_for_an_optimizer_that_steps_elsewhere() -> None:
    event = Mock(spec=torch.Event)
    tower("optim").set_post_optim_event(event)
    event.wait.assert_called_once_with()
