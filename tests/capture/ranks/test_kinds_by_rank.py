"""Ranks that get batches of different kinds in the same call: some replay, some have to capture."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_rollback_ranks import WIDTH, build
from torch import Tensor

import graphfsdp
from faults import World
from graphfsdp import Phase
from helpers import assert_same_state, snapshot
from ranks import RankPool

# Rows of each rank's batch in each call.
ROWS = (
    (4, 4), (4, 4), (4, 4), (4, 4), (4, 4), (4, 6), (4, 6), (4, 6), (6, 4), (2, 6), (6, 2), (2, 4),
    (2, 2), (6, 6), (4, 2), (2, 4), (4, 4),
)  # fmt: skip


def batch(index: int) -> Tensor:
    me = dist.get_rank()
    generator = torch.Generator().manual_seed(10 * index + me)
    return torch.randn(ROWS[index][me], WIDTH, generator=generator)


def train_on_kinds(strategy: str, scope: str, max_graphs: int) -> tuple[int, int]:
    options: dict[str, Any] = {"on_change": "recapture", "max_graphs": max_graphs}
    eager, eager_model, eager_optim = build(strategy, "none", on_change="eager")
    generator_state = torch.get_rng_state()
    expected = [eager(batch(index)) for index in range(len(ROWS))]
    torch.set_rng_state(generator_state)
    step, model, optim = build(strategy, scope, **options)
    for index, loss in enumerate(expected):
        assert torch.equal(step(batch(index)), loss), index
    state, now = snapshot(eager_model, eager_optim), snapshot(model, optim)
    assert_same_state(state, now)
    report = step.report()
    step.close()
    return report.num_captures, report.num_calls["replay"]


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_rank_captures_a_new_kind_while_the_other_has_a_graph(
    ranks2: RankPool, strategy: str
) -> None:
    captures, replays = zip(
        *ranks2.run(train_on_kinds, strategy, "full_iteration", 16), strict=True
    )
    assert min(captures) == 3
    assert min(replays) >= 3


def test_so_it_goes_with_an_eager_optimizer_and_with_graphs_that_are_given_up(
    ranks2: RankPool,
) -> None:
    ranks2.run(train_on_kinds, "optim_grads_params", "forward_backward", 16)
    ranks2.run(train_on_kinds, "optim_grads_params", "full_iteration", 1)


def begin_anew_on_one_rank(on_change: str) -> tuple[dict[str, int], str]:
    """Rank 1 changes a number that its graph has baked in, rank 0 does not."""
    losses: list[list[Tensor]] = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(3)
        step, model, optim = build("optim_grads_params", scope, on_change=on_change)
        losses.append([])
        dropout: Any = model.get_submodule("1")
        for index in range(11):
            if index == 5 and dist.get_rank() == 1:
                dropout.p = 0.7
            losses[-1].append(step(batch(index % 4)))
        state = snapshot(model, optim)
        if scope == "none":
            expected = state
    assert_same_state(expected, state)
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))
    calls, phase = step.report().num_calls, step.phase.value
    step.close()
    return dict(calls), phase


def test_a_rank_that_has_to_begin_anew_does_so_and_the_other_keeps_its_graph(
    ranks2: RankPool,
) -> None:
    (other, _), (changed, _) = ranks2.run(begin_anew_on_one_rank, "recapture")
    assert (other["capture"], changed["capture"]) == (1, 2)
    assert other["eager"] >= 1
    assert other["replay"] >= 4


def test_a_rank_that_goes_on_eagerly_is_met_by_replays(ranks2: RankPool) -> None:
    (other, phase), (changed, changed_phase) = ranks2.run(begin_anew_on_one_rank, "eager")
    assert (phase, changed_phase) == ("replay", "replay")
    assert other["replay"] == 8
    assert (changed["replay"], changed["eager"]) == (2, 6)


def fail_beside_a_new_kind() -> str:
    """Rank 0 has a batch that cannot be split, while rank 1 has one that is new."""
    options: dict[str, Any] = {"on_change": "recapture", "microbatches": 2}
    step, model, optim = build("optim_grads_params", "full_iteration", **options)
    for index in range(5):
        step(batch(index % 4))
    world = World(model, optim)
    texts = []
    for late in (0, 1, 0):
        time.sleep(0.2 if dist.get_rank() == late else 0)  # either is told of first
        x = torch.ones(3 if dist.get_rank() == 0 else 6, WIDTH)
        with pytest.raises(graphfsdp.GraphFSDPError) as caught:
            step(x)
        texts.append(str(caught.value))
        world.assert_unchanged("refused", without_gradients=True)
    for index in range(8):
        assert torch.isfinite(step(batch(index)))
    assert step.phase is Phase.REPLAY
    step.close()
    return " ".join(texts)


def test_a_failure_beside_a_new_kind_is_heard_and_training_goes_on(ranks2: RankPool) -> None:
    refused, heard = ranks2.run(fail_beside_a_new_kind)
    assert "rank 0 of 2 failed" not in refused
    assert heard.count("rank 0 of 2 failed") >= 3
