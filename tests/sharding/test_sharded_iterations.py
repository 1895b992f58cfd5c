"""iteration=fn of sharded models: as one unsharded process, and bit for bit in replays."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import (
    assert_same_state,
    assert_same_states,
    local_part,
    quick_garbage_collection,
)
from iterations import gan, make_trained, train_by
from ranks import on_ranks, rank_device
from sharding_helpers import FEW_STEPS, hybrid_mesh, num_steps_of

ROUNDING = 1e-6  # of a norm that is summed in parts, over some steps of 0.01 at most


def make(name: str, **options: Any) -> tuple[list[nn.Module], Any]:
    """Return models, sharded if there are options, and an optimizer for each, or only one."""

    def shard(model: nn.Module) -> None:
        for module in (*list(model.children())[1:3], model) if options else ():
            graphfsdp.fully_shard(module, **options)

    def adam(model: nn.Module) -> FusedAdam:
        return FusedAdam(model.parameters(), lr=1e-2, eps=1e-2)

    return make_trained(name, rank_device(), adam, adam, shard=shard)


def whole(tensor: Any) -> Tensor:
    full: Tensor = getattr(tensor, "full_tensor", tensor.detach)()
    return full.detach().clone()


def train(
    name: str, scope: str | None, num_steps: int, *, apart: bool, options: dict[str, Any]
) -> list[dict[str, Tensor]]:
    """Return results and weights, whole ones unless ``apart``: only this rank's rows.

    ``apart``: ranks have batches and random numbers of their own.
    """
    quick_garbage_collection()
    models, optimizers = make(name, **options)
    rank = dist.get_rank() if apart else 0
    torch.manual_seed(10 + rank)
    generator = torch.Generator().manual_seed(20 + rank)

    def state_of() -> dict[str, Tensor]:
        return {
            f"{key} of model {at}": local_part(param).detach().clone() if apart else whole(param)
            for at, model in enumerate(models)
            for key, param in model.named_parameters()
        }

    data = (torch.randn(8, 6, generator=generator).to(rank_device()) for _ in range(num_steps))
    return train_by(name, models, optimizers, data, scope, state_of)


@functools.cache
def alone(name: str) -> list[dict[str, Tensor]]:
    return train(name, None, FEW_STEPS, apart=False, options={})


@pytest.mark.parametrize(
    ("ranks", "name", "options"),
    [
        ("ranks2", "gan", {"strategy": "optim_grads_params"}),
        ("ranks2", "gradient_penalty", {"strategy": "optim_grads_params"}),
        ("ranks2", "moving_average", {"strategy": "optim_grads_params"}),
        ("ranks2", "gan", {"strategy": "optim", "overlap": False}),
        ("ranks2", "moving_average", {"strategy": "optim_grads", "outer_strategy": "no_shard"}),
        ("ranks2", "moving_average", {"strategy": "no_shard"}),
        (
            *("ranks4", "moving_average"),
            {
                "strategy": "optim_grads_params",
                "outer_strategy": "optim",
                "reshard_after_forward": False,
            },
        ),
    ],
)
@on_ranks()
def test_iterations_train_sharded_models_as_one_process_and_replay_as_eager(
    name: str, options: dict[str, Any]
) -> None:
    num_steps = num_steps_of(options["strategy"], "optim_grads_params")
    if "outer_strategy" in options:
        options = {**options, "mesh": hybrid_mesh((2, dist.get_world_size() // 2))}
    # Ranks that do the same reduce to what one process has, so the plain loop is the reference.
    sharded = train(name, None, FEW_STEPS, apart=False, options=options)
    for index, (expected, got) in enumerate(zip(alone(name), sharded, strict=True)):
        for key, value in expected.items():
            largest = float((value - got[key]).abs().max())
            assert largest <= ROUNDING, f"{key} after iteration {index}: {largest}"
    plain = train(name, None, FEW_STEPS, apart=True, options=options)
    eager, captured = (
        train(name, scope, num_steps, apart=True, options=options)
        for scope in ("none", "full_iteration")
    )
    assert_same_states(plain, eager[:FEW_STEPS])
    assert_same_states(eager, captured)


@on_ranks("ranks2")
def test_a_sharded_iteration_is_verified_evaluated_and_captured_again() -> None:
    models, optimizers = make("gan", strategy="optim_grads_params")

    def score(models: list[nn.Module], real: Tensor) -> Tensor:
        out: Tensor = models[1](real)
        return out.mean()

    step = graphfsdp.capture(
        models, optimizers, iteration=gan, loss_fn=score, verify=3, on_change="recapture"
    )
    with step:
        for index in range(16):
            step(torch.randn(8 if index % 3 else 6, 6, device=rank_device()))
            assert not step.evaluate(torch.ones(4, 6, device=rank_device())).requires_grad
        assert step.report().num_calls["capture"] == 2
        assert step.report().num_calls["replay"] >= 6
        step.verify(2)


@on_ranks("ranks2")
def test_a_sharded_iteration_is_captured_ahead_of_time() -> None:
    runs = []
    for example in (None, torch.zeros(8, 6, device=rank_device())):
        models, optimizers = make("gan", strategy="optim_grads_params")
        torch.manual_seed(dist.get_rank())
        args: dict[str, Any] = {} if example is None else {"example_batch": example}
        with graphfsdp.capture(models, optimizers, iteration=gan, **args) as step:
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(7):
                step(torch.randn(8, 6, generator=generator).to(rank_device()))
        params = [p for model in models for p in model.parameters()]
        runs.append({str(at): whole(param) for at, param in enumerate(params)})
    assert_same_state(runs[0], runs[1])
