"""Ranks that would not do the same in a call: eager ones meet replays, new kinds are refused."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import graphfsdp
from graphfsdp import Phase
from helpers import assert_same_state, snapshot
from rank_steps import WIDTH, build
from ranks import RankPool


def batch(index: int) -> Tensor:
    me = dist.get_rank()
    generator = torch.Generator().manual_seed(10 * index + me)
    return torch.randn(4, WIDTH, generator=generator)


def begin_anew_on_one_rank() -> tuple[dict[str, int], str]:
    """Rank 1 changes a number that its graph has baked in, rank 0 does not."""
    losses: list[list[Tensor]] = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(3)
        step, model, optim = build("optim_grads_params", scope, on_change="eager")
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


def test_a_rank_that_goes_on_eagerly_is_met_by_replays(ranks2: RankPool) -> None:
    (other, phase), (changed, changed_phase) = ranks2.run(begin_anew_on_one_rank)
    assert (phase, changed_phase) == ("replay", "replay")
    assert other["replay"] == 8
    assert (changed["replay"], changed["eager"]) == (2, 6)


def meet_a_new_kind() -> str:
    """Rank 1 has a batch that it has no graph for yet, rank 0 replays."""
    step, *_ = build("optim_grads_params", "full_iteration", on_change="recapture")
    for index in range(5):
        step(batch(index))
    try:
        for _ in range(3):
            step(torch.ones(6 if dist.get_rank() else 4, WIDTH))
    except graphfsdp.RankFailedError as error:
        assert step.phase is Phase.BROKEN
        return str(error)
    return ""


def test_a_kind_that_is_new_to_one_rank_alone_is_refused_on_all() -> None:
    pool = RankPool(2)
    try:
        for text in pool.run(meet_a_new_kind):
            assert text.startswith("rank 0 of 2 replayed iteration 6, for whose batch another")
    finally:
        pool.close(force=True)
