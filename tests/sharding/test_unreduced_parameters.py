"""Parameters beside sharded ones whose gradients nobody would reduce: ranks would drift apart."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import graphfsdp
from counting_net import mean_square
from graphfsdp import HazardKind
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from ranks import on_ranks, rank_device


def half_sharded() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(rank_device())
    graphfsdp.fully_shard(model[0])
    return model


def both(models: list[nn.Module], optimizer: FusedAdam, x: Tensor) -> None:
    for model in models:
        mean_square(model, x).backward()
    optimizer.step()


def weights_apart(model: nn.Module) -> bool:
    """Train a few steps; tell whether the ranks have other weights then."""
    step = graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.1), loss_fn=mean_square)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        step(torch.randn(3, 4, device=rank_device()))
    step.close()
    last: Any = list(model.parameters())[-1]
    mine = last.full_tensor() if hasattr(last, "full_tensor") else last.detach()
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine.contiguous())
    return not torch.equal(*gathered)


@on_ranks("ranks2")
def test_parameters_that_nobody_reduces_are_refused_by_name() -> None:
    for scope in ("full_iteration", "forward_backward", "none"):
        model = half_sharded()
        optimizer = FusedAdam(model.parameters())
        with pytest.raises(ConfigError, match=r"train '1.weight', '1.bias' for itself.*Ways out"):
            graphfsdp.capture(model, optimizer, loss_fn=mean_square, scope=scope)
    many = nn.ModuleList([half_sharded(), *(nn.Linear(4, 4) for _ in range(3))])
    with pytest.raises(ConfigError, match=r"'1.weight'.* and 3 more for itself.* the 2 ranks"):
        graphfsdp.capture(many, FusedAdam(many.parameters()), loss_fn=mean_square)
    models = [graphfsdp.fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4, bias=False)]
    optimizer = FusedAdam([p for model in models for p in model.parameters()])
    with pytest.raises(ConfigError, match=r"train '1.weight' for itself.*not this one"):
        graphfsdp.capture(models, optimizer, iteration=both)
    x = torch.ones(3, 4, device=rank_device())
    model = half_sharded()
    report = graphfsdp.check(model, FusedAdam(model.parameters()), x, loss_fn=mean_square)
    kinds = [hazard.kind for hazard in report.hazards if "for itself" in hazard.why]
    assert kinds == [HazardKind.CONFIG]

    model = half_sharded()
    model[1].requires_grad_(False)
    assert not weights_apart(model)
    model = half_sharded()
    graphfsdp.fully_shard(model, strategy="no_shard")
    assert not weights_apart(model)
    model = half_sharded()
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    for name, param in list(model[1].named_parameters()):
        replica = distribute_tensor(param.detach(), mesh, [Replicate()])
        setattr(model[1], name, nn.Parameter(replica))
    graphfsdp.capture(
        model, FusedAdam(model.parameters()), loss_fn=mean_square
    ).close()  # torch's care


@on_ranks("ranks1")
def test_one_rank_has_nobody_to_drift_from() -> None:
    model = half_sharded()
    step = graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=mean_square)
    step(torch.ones(3, 4, device=rank_device()))
    step.close()
