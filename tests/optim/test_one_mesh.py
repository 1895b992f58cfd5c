"""torch's own optimizers on models of which parallelize_module has cut a part: 2 x 2 ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphfsdp
from graphfsdp.errors import ConfigError
from parallel_models import TP_AXES, part_of_axis, plain_model, tensor_parallel, whole_batches
from ranks import RankPool
from sharding_helpers import (
    assert_replayed,
    assert_same_training,
    assert_trains_as_one,
    hybrid_mesh,
    train,
)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)


def foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)


def both_scopes() -> None:
    mesh = hybrid_mesh((2, 2), TP_AXES)
    batches = whole_batches()
    parts = [part_of_axis(batch, mesh, "dp") for batch in batches]
    model = tensor_parallel()
    meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
    assert len(meshes) > 1, "the test is of no use"
    runs = []
    for trained, data, scope in (
        (model, parts, "none"),
        (tensor_parallel(), parts, "full_iteration"),
        (plain_model(), batches, "none"),
    ):
        optimizer = fused(trained)
        groups = optimizer.param_groups
        runs.append(train(trained, optimizer, data=data, max_grad_norm=0.5, scope=scope))
        assert optimizer.param_groups is groups
        assert len(groups) == 1
    eager, captured, plain = runs
    assert_same_training(eager, captured)
    assert_replayed(captured)
    assert_trains_as_one(captured, plain, mesh.get_group("dp"))


def test_an_optimizer_of_torch_steps_on_parameters_of_two_meshes(ranks4: RankPool) -> None:
    ranks4.run(both_scopes)


def partly_cut() -> nn.Module:
    """Return a model with DTensors on a tp axis, and plain parameters beside them."""
    mesh = hybrid_mesh((2, 2), TP_AXES)
    model = plain_model()
    blocks: Any = model.blocks
    for block in blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def iterate(
    model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor, clips: bool = False
) -> Tensor:
    loss: Tensor = model(*batch)
    loss.backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def beside_plain_parameters() -> None:
    batch = part_of_axis(whole_batches()[0], hybrid_mesh((2, 2), TP_AXES), "dp")
    step = start(partly_cut(), fused, iteration=partial(iterate, clips=True))
    with pytest.raises(ConfigError, match=r"several device meshes.*FusedAdam.*clip_grad_norm_"):
        step(*batch)
    step.close()
    runs: list[tuple[Make, dict[str, Any]]] = [
        (foreach, {"iteration": iterate}),
        (fused, {"max_grad_norm": 0.5}),
    ]
    for make, options in runs:
        losses = {}
        for scope in ("none", "full_iteration"):
            with start(partly_cut(), make, scope=scope, **options) as step:
                losses[scope] = torch.stack([step(*batch) for _ in range(8)])
        assert torch.equal(losses["none"], losses["full_iteration"])
        assert losses["none"][-1] < losses["none"][0]


Make = Callable[[nn.Module], torch.optim.Optimizer]


def start(model: nn.Module, make: Make, **options: Any) -> graphfsdp.CapturedStep:
    return graphfsdp.capture(model, make(model), **options)


def test_plain_parameters_beside_cut_ones_work_or_are_refused_with_a_remedy(
    ranks4: RankPool,
) -> None:
    ranks4.run(beside_plain_parameters)
