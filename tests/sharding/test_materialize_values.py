"""Values of models on the meta device that come from elsewhere, or do not come."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from ranks import on_ranks, rank_device
from sharding_helpers import Block, adam, full_parameters, on_meta, raises_on_rank, shard


class Broken(nn.Module):
    """Its method fails, does half, or puts in another tensor, on the ranks that it is told."""

    def __init__(self, how: str, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.how, self.rank = how, rank

    def reset_parameters(self) -> None:
        how = self.how if dist.get_rank() == self.rank or self.rank < 0 else "right"
        if how == "raise":
            raise ArithmeticError("no luck")
        if how == "shape":
            self.weight = nn.Parameter(torch.ones(2, 2))
        elif how == "new":
            self.weight = nn.Parameter(torch.full((6, 4), 9.0))
        elif how != "nothing":
            nn.init.ones_(self.weight[: 3 if how == "half" else 6])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Around(nn.Module):
    def __init__(self, how: str, rank: int = -1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Broken(how, rank)])
        self.last = nn.Linear(6, 2)
        self.plain: Tensor
        self.register_buffer("plain", torch.empty(3))

    def reset_parameters(self) -> None:
        self.plain.zero_()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x) + self.plain.sum()
        return out


@pytest.mark.parametrize(
    ("how", "rank", "expected"),
    [
        ("raise", -1, "the initialisation of blocks.1 (Broken) failed: ArithmeticError: no luck"),
        ("raise", 1, "rank 1: the initialisation of blocks.1 (Broken) failed: ArithmeticError"),
        ("half", 0, "rank 0: parameter 'blocks.1.weight' has no values, or only some"),
        ("nothing", -1, "parameter 'blocks.1.weight' has no values, or only some, after"),
        ("shape", 1, "rank 1: the initialisation of parameter 'blocks.1.weight' put shape (2, 2)"),
    ],
)
@on_ranks("ranks2")
def test_a_failure_on_one_rank_is_told_to_all(how: str, rank: int, expected: str) -> None:
    """Every rank raises the same, and the model can be materialised afterwards."""
    model: Any = shard(on_meta(lambda: Around(how, rank)), "optim_grads_params")
    with raises_on_rank(graphfsdp.GraphFSDPError) as messages:
        graphfsdp.materialize(model)
    assert model.plain.is_meta
    remedy = "has no values yet. Remedy: graphfsdp.materialize"
    with raises_on_rank(graphfsdp.ConfigError, remedy):
        model(torch.zeros(2, 4, device=rank_device()))
    model.blocks[1].how = "new"
    model.blocks[1].rank = -1
    graphfsdp.materialize(model)
    assert torch.equal(full_parameters(model)["blocks.1.weight"], torch.full((6, 4), 9.0))
    model(torch.zeros(2, 4, device=rank_device())).sum().backward()
    said: list[Any] = [None, None]
    dist.all_gather_object(said, messages[0])
    assert said[0] == said[1]
    assert said[0].startswith(expected)


@on_ranks("ranks2")
def test_misuses_are_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.register_buffer("table", torch.empty(3))

    model = on_meta(lambda: nn.Sequential(Bare(), nn.Linear(2, 2)))
    graphfsdp.fully_shard(model)
    with raises_on_rank(
        graphfsdp.ConfigError, "nothing initialises '0.weight' (Bare), '0.table' (Bare)", "init="
    ):
        graphfsdp.materialize(model)
    with raises_on_rank(graphfsdp.ConfigError, "'0.weight' has no values"):
        graphfsdp.materialize(model, init=lambda module: None)
    for call, words in (
        (lambda: graphfsdp.materialize(model, "meta"), "cannot give memory on the meta device"),
        (lambda: graphfsdp.materialize(model, init=3), "as init a function of a module; got FSDP"),  # type: ignore[arg-type]
        (lambda: model.half(), "cast the model before fully_shard"),
        (lambda: model.unshard(), "has no values yet"),
        (lambda: graphfsdp.capture(model, adam(model))(torch.ones(1, 2)), "meta"),
    ):
        with raises_on_rank(graphfsdp.GraphFSDPError, words):
            call()
    other = nn.Linear(2, 2, device="meta" if dist.get_rank() else rank_device())
    graphfsdp.fully_shard(other)
    with raises_on_rank(graphfsdp.ConfigError, "without values"):
        graphfsdp.materialize(other)
    held = graphfsdp.fully_shard(nn.Linear(2, 2, device="meta"))
    keeper = weakref.ref(held.weight)
    with raises_on_rank(graphfsdp.ConfigError, "'weight' cannot be moved from the meta device"):
        graphfsdp.materialize(held)
    assert keeper() is not None


@pytest.mark.parametrize("root_is_unit", [True, False])
@on_ranks("ranks2")
def test_to_empty_works_as_in_fsdp2(root_is_unit: bool) -> None:
    """``to_empty``, then values by hand, as torch's own fully_shard wants it."""
    with torch.device("meta"):  # also around fully_shard
        model: Any = Around("right")
        for block in model.blocks:
            graphfsdp.fully_shard(block)
        if root_is_unit:
            graphfsdp.fully_shard(model)
    model.blocks[1].weight.tag = 3
    held = [id(param) for param in model.blocks.parameters()]
    model.to_empty(device=rank_device())
    assert held == [id(param) for param in model.blocks.parameters()]
    optim = adam(model)
    assert model.blocks[1].weight.tag == 3
    assert all(bool(param.to_local().isnan().all()) for param in model.blocks.parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
        model.plain.zero_()
    model(torch.full((2, 4), 1.0, device=rank_device())).sum().backward()
    optim.step()
    for name, value in full_parameters(model).items():
        assert not torch.equal(value, torch.full_like(value, 0.25)), name


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
def test_what_a_checkpoint_lacks_is_named_and_the_model_still_awaits_values(tmp_path: Path) -> None:
    folder = str(tmp_path)
    torch.manual_seed(0)
    saved = shard(Tabled().to(rank_device()), "optim_grads_params")
    graphfsdp.save(folder, saved, step=1)
    model: Any = shard(on_meta(lambda: Tabled(bias=True)), "optim_grads_params")
    with raises_on_rank(graphfsdp.CheckpointMismatchError, "'head.bias' is missing"):
        graphfsdp.load(folder, model)
    with raises_on_rank(graphfsdp.ConfigError, "has no values yet"):
        model(batch(0))
    assert model.steps.is_meta
