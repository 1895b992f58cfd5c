"""Compiled replays beside eager, within a third of the bound; on ranks, exactly."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, run
from ranks import on_ranks
from sharding_helpers import make_net, replayed_as_eager
from stand_in_compilers import (
    BOUNDS,
    LIMIT_S,
    Compiled,
    StretchGraph,
    as_it_is,
    assert_within_a_third_of_the_bound,
    compiling,
    compiling_by,
    needs_compiler,
)
from zoo_models import WIDTH

CPU = torch.device("cpu")


class Net(nn.Module):
    """Batch statistics, dropout, attention, tied weights, and an attribute that is kept."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.drop(self.embedding(tokens))
        hidden = hidden + nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
        hidden = self.norm(hidden.flatten(0, 1).relu())
        self.kept = hidden.detach().float().mean()
        return nn.functional.cross_entropy(self.last(hidden).float(), tokens.flatten())


def tokens(generator: torch.Generator) -> Batch:
    return Batch((torch.randint(WIDTH, (6, 5), generator=generator),))


@needs_compiler
@pytest.mark.time_limit(LIMIT_S)
def test_training_is_within_the_bound_of_eager() -> None:
    options: dict[str, Any] = {"max_grad_norm": 0.5, "skip_nonfinite": True, "microbatches": 2}
    case = Case(Net, tokens)
    expected = run(case, "none", CPU, num_steps=8, **options)
    got = run(case, "full_iteration", CPU, num_steps=8, compile=True, **options)
    assert_within_a_third_of_the_bound(expected, got, BOUNDS[torch.float32])
    assert "nodes in 1 pieces" in got.report.compiled[0], got.report.compiled


@needs_compiler
@pytest.mark.time_limit(LIMIT_S)
@pytest.mark.parametrize(("dtype", "compiles"), [(torch.float32, "auto"), (torch.bfloat16, True)])
def test_verification_is_by_the_bound(dtype: torch.dtype, compiles: bool | str) -> None:
    """With torch's AdamW as users make it, whose many operators are compiled as well."""
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, 16)
    model = nn.Sequential(first, nn.GELU(), nn.Linear(16, 3)).to(dtype)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if dtype == torch.bfloat16:
        optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
    x = torch.randn(12, WIDTH, dtype=dtype)
    with graphfsdp.capture(
        model, optimizer, loss_fn=lambda m, x: m(x).float().square().mean(), compile=compiles
    ) as step:
        losses = [float(step(x)) for _ in range(8)]
        assert losses == sorted(losses, reverse=True)
        step.verify(2)
        assert float(step(x)) < losses[-1]
        lines = step.report().compiled
        assert not lines[0].startswith("0 of") or compiles == "auto", lines
        with torch.no_grad():
            kept = first.weight.clone()
        evaluated = [float(step.evaluate(x)) for _ in range(3)]
        assert evaluated == pytest.approx([evaluated[0]] * 3, rel=0.1)
        assert torch.equal(kept, first.weight)


MICROBATCHES = 2


def fails_on_rank_1(graph: StretchGraph) -> Compiled:
    if dist.get_rank() == 1:
        raise RuntimeError("no such luck")
    return as_it_is(graph)


def pays_on_rank_0(*runs: object) -> bool:
    return dist.get_rank() == 0


@pytest.mark.parametrize(
    ("strategy", "compiler", "compiles"),
    [
        ("optim_grads_params", as_it_is, True),
        ("optim_grads", fails_on_rank_1, True),
        ("optim", as_it_is, "auto"),
    ],
)
@on_ranks("ranks2")
def test_ranks_replay_as_eager(strategy: str, compiler: Any, compiles: bool | str) -> None:
    """Collectives stay where they were, also where the ranks keep other pieces."""
    with compiling_by(compiler), mock.patch.object(compiling, "_pays", pays_on_rank_0):
        trained = replayed_as_eager(
            lambda: make_net(strategy, 0.1), microbatches=MICROBATCHES, compile=compiles
        )
    first, *others = trained.report.compiled
    failed = (compiler is fails_on_rank_1 or compiles == "auto") and dist.get_rank() == 1
    assert first.startswith("0 of") is failed, first
    assert any("graphfsdp.reduce_scatter_" in line for line in others)
