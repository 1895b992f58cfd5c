"""Checkpoints that are loaded straight into models on the meta device."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from ranks import on_ranks, rank_device
from sharding_helpers import Block, adam, full_parameters, on_meta, raises_on_rank, shard


class Tabled(nn.Module):
    """A model with a table that no checkpoint holds, and a buffer that one does."""

    table: Tensor
    steps: Tensor

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("steps", torch.tensor(5))
        self.head = nn.Linear(8, 3, bias=bias)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(8.0))
        self.steps.fill_(-1)
        torch.rand(())  # moves the generator

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + self.table)
        out: Tensor = self.head(x).square().mean()
        return out


def batch(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index + 10 * dist.get_rank())
    return torch.randn(4, 8, generator=generator).to(rank_device())


def run(model: nn.Module, optim: torch.optim.Optimizer, first: int, num_steps: int) -> list[Tensor]:
    with graphfsdp.capture(model, optim) as step:
        return [step(batch(index)) for index in range(first, first + num_steps)]


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks("ranks2")
def test_a_run_goes_on_in_a_model_from_meta(tmp_path: Path, strategy: str) -> None:
    """A run that goes on from a checkpoint goes on the same, whether its model was on meta."""
    torch.manual_seed(0)
    first: Any = shard(Tabled().to(rank_device()), "optim_grads_params")
    optim = adam(first)
    run(first, optim, 0, 2)
    graphfsdp.save(tmp_path, first, optim, step=2)
    runs, generators = [], []
    for meta in (False, True):
        torch.manual_seed(7)
        model: Any = on_meta(Tabled) if meta else Tabled().to(rank_device())
        shard(model, strategy)
        held = list(map(id, model.parameters()))
        model.prepare_shards()  # to where they stay
        optim = adam(model)  # before there is memory
        graphfsdp.load(tmp_path, model, optim)
        generators.append(torch.get_rng_state())
        assert held == list(map(id, model.parameters()))
        assert torch.equal(model.table, torch.arange(8.0, device=rank_device()))
        assert int(model.steps) == 5
        runs.append(run(model, optim, 2, 6) + list(full_parameters(model).values()))
    assert torch.equal(*generators)
    for index, (left, right) in enumerate(zip(*runs, strict=True)):
        assert torch.equal(left, right), (index, float((left - right).abs().max()))
    model = on_meta(Tabled)  # whole; no unit
    with rank_device():
        graphfsdp.load(tmp_path, model)
    for name, value in full_parameters(first).items():
        assert torch.equal(value, dict(model.named_parameters())[name].detach()), name


@on_ranks("ranks2")
def test_what_a_checkpoint_lacks_is_named_or_initialised(tmp_path: Path) -> None:
    folder = str(tmp_path)
    torch.manual_seed(0)
    saved = shard(Tabled().to(rank_device()), "optim_grads_params")
    expected = full_parameters(saved)
    graphfsdp.save(folder, saved, step=1)
    model: Any = shard(on_meta(lambda: Tabled(bias=True)), "optim_grads_params")
    with raises_on_rank(graphfsdp.CheckpointMismatchError, "'head.bias' is missing"):
        graphfsdp.load(folder, model)
    with raises_on_rank(graphfsdp.ConfigError, "has no values yet"):
        model(batch(0))
    assert model.steps.is_meta
    skipped = graphfsdp.load(folder, model, strict=False).skipped
    assert skipped == ("model: 'head.bias' is missing in the checkpoint",)
    got = full_parameters(model)
    bias = got.pop("head.bias")
    assert 0 < float(bias.abs().max()) <= 8**-0.5  # as its constructor draws it
    assert all(torch.equal(value, got[name]) for name, value in expected.items())
    assert int(model.steps) == 5
    model(batch(0)).backward()
