"""torch's own optimizers on models of which parallelize_module has cut a part: 2 x 2 ranks."""

from collections.abc import Callable
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
    Training,
    assert_replayed,
    assert_same_training,
    assert_trains_as_one,
    full_parameters,
    hybrid_mesh,
)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)


def foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)


def train(model: nn.Module, batches: Any, scope: str) -> Training:
    optimizer = fused(model)
    groups = optimizer.param_groups
    result = Training()
    with graphfsdp.capture(model, optimizer, max_grad_norm=0.5, scope=scope) as step:
        for index, batch in enumerate(batches):
            groups[0]["lr"].fill_(0.01 / (1 + index % 3))
            result.losses.append(step(*batch))
            assert step.grad_norm is not None
            result.norms.append(step.grad_norm)
            assert optimizer.param_groups is groups
            assert len(groups) == 1
        result.params = full_parameters(model)
        result.report = step.report()
    return result


def both_scopes() -> None:
    mesh = hybrid_mesh((2, 2), TP_AXES)
    batches = whole_batches()
    parts = [part_of_axis(batch, mesh, "dp") for batch in batches]
    model = tensor_parallel()
    meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
    assert len(meshes) > 1, "the test is of no use"
    runs = [train(model, parts, "none"), train(tensor_parallel(), parts, "full_iteration")]
    assert_same_training(*runs)
    assert_replayed(runs[1])
    plain = train(plain_model(), batches, "none")
    assert_trains_as_one(runs[1], plain, mesh.get_group("dp"))


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


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def clip_and_iterate(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def beside_plain_parameters() -> None:
    batch = part_of_axis(whole_batches()[0], hybrid_mesh((2, 2), TP_AXES), "dp")
    step = start(partly_cut(), fused, iteration=clip_and_iterate)
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
