"""`shard_placement_fn=Shard(dim)`: cut as torch's fully_shard cuts, and trained alike."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as torchs_common
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import graphfsdp
from counting_net import mean_square
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    adam,
    assert_equal_tensors,
    assert_trains_as_whole,
    full_parameters,
    hybrid_mesh,
    on_meta,
    raises_on_rank,
    replayed_as_eager,
    train,
)

WIDTH = 8
NUM_STEPS = 7


class Experts(nn.Module):
    """Fewer than ranks, so that they are cut along their features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, WIDTH, 12) / 4)
        self.down = nn.Parameter(torch.randn(3, 12, WIDTH) / 4)
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("ni,eih->neh", x, self.up).tanh()
        out = torch.einsum("neh,eho->neo", mixed, self.down)
        result: Tensor = x + (out * self.gate(x).softmax(-1)[..., None]).sum(1)
        return result


def place(param: nn.Parameter) -> Shard | None:
    """The first matrix by its last dimension, the second one by that in the middle."""
    if param.dim() < 3:
        return None
    return Shard(-1) if param.shape[-1] > WIDTH else Shard(1)


def make(shard: Any = graphfsdp.fully_shard, dtype: Any = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Experts(), Experts(), nn.Linear(WIDTH, 1))
    model.to(rank_device(), dtype)
    for layer in model[:2] if shard is not None else ():
        shard(layer, shard_placement_fn=place, **options)
    return model if shard is None else shard(model, **options)


def data(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    draw = torch.randn(NUM_STEPS, 4, WIDTH, generator=generator, dtype=torch.float64)
    return [(x.to(rank_device(), dtype),) for x in draw]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("ranks2")
def test_training_is_that_of_the_whole_model(strategy: str) -> None:
    """On the same batch on each rank; captured and eager agree bit for bit."""
    options: dict[str, Any] = {"data": data(), "loss_fn": mean_square}
    got = replayed_as_eager(lambda: make(strategy=strategy), num_steps=NUM_STEPS, **options)
    assert_trains_as_whole(got, whole=make(None), **options)


@on_ranks("ranks4")
def test_each_rank_holds_what_torchs_holds() -> None:
    for mesh in (None, hybrid_mesh()):
        theirs, ours = (make(s, mesh=mesh) for s in (torch_fully_shard, graphfsdp.fully_shard))
        for model in (theirs, ours):
            mean_square(model, data()[0][0]).backward()
        norms = []
        for model in (theirs, ours):
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append(norm.full_tensor())
        torch.testing.assert_close(*norms)
        pairs: Any = zip(theirs.named_parameters(), ours.parameters(), strict=True)
        for (name, param), mine in pairs:
            if param.dim() == 3:
                assert mine.placements == param.placements, name
                assert torch.equal(mine.to_local(), param.to_local()), name
                torch.testing.assert_close(mine.grad.to_local(), param.grad.to_local())
            assert torch.equal(mine.full_tensor(), param.full_tensor())
            torch.testing.assert_close(mine.grad.full_tensor(), param.grad.full_tensor())
        for model, other in ((ours, theirs), (theirs, ours)):  # states go to and fro
            with torch.no_grad():
                for param in other.parameters():
                    param.mul_(0.5)
            state = {name: value.full_tensor() for name, value in other.state_dict().items()}
            set_model_state_dict(
                model,
                state,
                options=StateDictOptions(full_state_dict=True),
            )
            assert_equal_tensors(full_parameters(model), full_parameters(other))


@on_ranks("ranks2")
def test_copies_files_and_the_meta_device(tmp_path: Path) -> None:
    model = make(dtype=torch.float32)
    optimizer = adam(model)
    train(model, optimizer, data=data(torch.float32), loss_fn=mean_square)
    assert_equal_tensors(full_parameters(copy.deepcopy(model)), full_parameters(model))
    graphfsdp.save(str(tmp_path), model, optimizer, step=1)
    other: Any = on_meta(lambda: nn.Sequential(Experts(), Experts(), nn.Linear(WIDTH, 1)))
    for layer in other[:2]:
        graphfsdp.fully_shard(layer, shard_placement_fn=place)
    graphfsdp.fully_shard(other)
    again = adam(other)
    graphfsdp.load(str(tmp_path), other, again)
    assert_equal_tensors(full_parameters(other), full_parameters(model))
    runs = [
        train(each, optim, data=data(torch.float32), loss_fn=mean_square)
        for each, optim in ((model, optimizer), (other, again))
    ]
    assert_equal_tensors(*(run.tensors() for run in runs))


class LocalExperts(nn.Module):
    """Each rank of an axis has other experts, which the ranks along the other axis share."""

    def __init__(self, experts: DeviceMesh) -> None:
        super().__init__()
        whole = torch.randn(4, WIDTH, WIDTH, dtype=torch.float64) / 4
        self.mixes = nn.Parameter(distribute_tensor(whole.to(rank_device()), experts, [Shard(0)]))
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixes: Any = self.mixes
        mixed = torch.einsum("ni,eio->neo", x, mixes.to_local()).tanh()
        result: Tensor = x + (mixed * self.gate(x).softmax(-1)[..., None]).sum(1)
        return result


def with_experts(shard: Any, **options: Any) -> Any:
    """Experts are cut over half of the ranks, everything else over all, as torchtitan does it."""
    torch.manual_seed(0)
    mesh = hybrid_mesh((2, 2), ("efsdp", "ep"))
    everyone = mesh._flatten("dp")
    over = torchs_common.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    usual = torchs_common.FSDPMeshInfo(everyone, shard_mesh_dim=0)
    model: Any = nn.Sequential(LocalExperts(mesh["ep"]), LocalExperts(mesh["ep"]))
    model.to(rank_device(), torch.float64)
    for layer in model:
        infos = {layer.mixes: over}

        def place(param: nn.Parameter, infos: Any = infos) -> Any:
            return torchs_common.ShardPlacementResult(Shard(0), infos.get(param, usual))

        shard(layer, mesh=everyone, shard_placement_fn=place, **options)
    return shard(model, mesh=everyone, **options)


@pytest.mark.skipif(
    not hasattr(torchs_common, "ShardPlacementResult"), reason="torch 2.11 has none"
)
@on_ranks("ranks4")
def test_parameters_with_a_mesh_of_their_own() -> None:
    """What torch's comes to; captured as eager, whichever ranks keep the weights."""
    options: dict[str, Any] = {"data": data(), "loss_fn": mean_square, "num_steps": NUM_STEPS}
    torchs = with_experts(torch_fully_shard)
    mine = with_experts(graphfsdp.fully_shard)
    for model in (torchs, mine):
        mean_square(model, data()[dist.get_rank()][0]).backward()
    for theirs, ours in zip(torchs.parameters(), mine.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())
        assert ours.device_mesh.ndim == theirs.device_mesh.ndim
    several: list[dict[str, Any]] = [{"reshard_after_forward": after} for after in (True, False, 2)]
    runs = [
        replayed_as_eager(partial(with_experts, graphfsdp.fully_shard, **after), **options)
        for after in several
    ]
    for run in runs[1:]:
        assert_equal_tensors(runs[0].tensors(), run.tensors())
    twin = copy.deepcopy(mine)
    assert_equal_tensors(full_parameters(twin), full_parameters(mine))
    assert len(mine.process_groups()) == 3
    mesh = hybrid_mesh((2, 2), ("replicate", "shard"))
    info = torchs_common.FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0)
    elsewhere = torchs_common.ShardPlacementResult(Shard(0), info)
    with raises_on_rank(graphfsdp.ConfigError, "'weight'", "a mesh of its own", "outer_strategy"):
        graphfsdp.fully_shard(
            nn.Linear(4, 4).to(rank_device()),
            mesh,
            outer_strategy="optim",
            shard_placement_fn=lambda _: elsewhere,
        )


@on_ranks("ranks4")
def test_beside_tensor_parallelism() -> None:
    """Cut by rows over one axis, by columns over the other."""
    mesh = hybrid_mesh((2, 2), ("dp", "tp"))
    results = []
    for shard in (torch_fully_shard, graphfsdp.fully_shard):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh()).to(rank_device())
        parallelize_module(model[0], mesh["tp"], ColwiseParallel())
        shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(p.dim() - 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in data(torch.float32):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(list(full_parameters(model).values()))
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
