"""A fault on one rank, or another call on it: what the others hear, and how all of them go on."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import graphfsdp
from faults_at_operators import FAULTS, Fault, FaultMode, World
from graphfsdp import Phase
from graphfsdp._capture.ranks.whereabouts import Whereabouts
from graphfsdp.base.collectives import Interruptible
from graphfsdp.base.rank_agreement import RankStore
from helpers import assert_same_state, quick_garbage_collection, snapshot
from rank_steps import WIDTH, batch, build
from ranks import RankPool, on_ranks
from time_limits import slowdown


def losses_without_faults(strategy: str, num_calls: int) -> list[Tensor]:
    step, *_ = build(strategy, "none")
    return [step(batch(index)) for index in range(num_calls)]


class LateError(Exception):
    """An ordinary error of a user, after all collectives of the iteration."""


def fails_on_one_rank(strategy: str) -> None:
    """In the optimizer's step hook on rank 1: all roll back and go on, the group is intact."""
    expected = losses_without_faults(strategy, 7)
    step, model, optim = build(strategy, "full_iteration")
    fails = {"on": False}

    def hook(*args: object) -> None:
        if fails["on"] and dist.get_rank() == 1:
            raise LateError("of rank 1")

    optim.register_step_post_hook(hook)
    for index in range(7):
        if index <= 2:
            world = World(model, optim)
            fails["on"] = True
            if dist.get_rank() == 1:
                with pytest.raises(LateError, match="of rank 1"):
                    step(batch(index))
            else:
                message = r"rank 1 of 2 failed in iteration \d+: LateError: of rank 1.*as it was"
                with pytest.raises(graphfsdp.CaptureError, match=message):
                    step(batch(index))
            world.assert_unchanged(f"call {index}")
            fails["on"] = False
        assert torch.equal(step(batch(index)), expected[index]), index
    assert step.report().num_captures == 1


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_an_error_on_one_rank_undoes_the_iteration_on_all(ranks2: RankPool, strategy: str) -> None:
    ranks2.run(fails_on_one_rank, strategy)


def fails_while_the_other_is_busy(slow: float) -> None:
    """Rank 1 fails at the end of an iteration that rank 0 takes long for."""
    step, model, optim = build("optim_grads_params", "full_iteration")
    step(batch(0))
    world = World(model, optim)

    def hook(*args: object) -> None:
        if dist.get_rank() == 1:
            raise LateError("of rank 1")
        time.sleep(1.5 * slow)

    handle = optim.register_step_post_hook(hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphfsdp._capture.ranks.ranks._SILENT_S", 0.7 * slow)
        with pytest.raises((LateError, graphfsdp.CaptureError), match="of rank 1"):
            step(batch(1))
    world.assert_unchanged("call 1")
    handle.remove()
    step(batch(1))
    assert step.phase is graphfsdp.Phase.WARMUP


def test_a_rank_that_fails_waits_for_one_that_is_busy(ranks2: RankPool) -> None:
    ranks2.run(fails_while_the_other_is_busy, slowdown())


@on_ranks("ranks2")
def test_an_old_question_is_answered_by_nobody() -> None:
    """The listening thread may look late, when the calls after the one asked about failed too."""
    group = dist.group.WORLD
    assert group is not None
    store = RankStore([group], "late looks")
    whereabouts = Whereabouts(store)
    asked = ""
    for _ in range(2):
        whereabouts.enter("iteration", Interruptible(lambda: None))
        assert whereabouts.come_out(silent_s=30.0)
        whereabouts.leave()
        asked = asked or store.get("asked") or ""
    dist.barrier()
    store.put("asked", asked)
    whereabouts.answer()
    assert not store.has(["lost"])


def fails_on_both_ranks(strategy: str) -> int:
    """At the same operator on both ranks: each says its own error."""
    expected = losses_without_faults(strategy, 6)
    step, model, optim = build(strategy, "full_iteration")
    num_faults = 0
    for index in range(6):
        if index <= 2:
            for position in range(index, 75, 8 if index < 2 else 17):
                quick_garbage_collection()
                world = World(model, optim)
                # Not Ctrl-C: the ranks of the tests ignore that signal.
                fault = (Fault.ERROR, Fault.OUT_OF_MEMORY)[position % 2]
                mode = FaultMode(position, fault, after=position % 3 == 0)
                with pytest.raises(FAULTS), mode:
                    step(batch(index))
                world.assert_unchanged(f"call {index}: {mode.fired} at {position}")
                num_faults += 1
        assert torch.equal(step(batch(index)), expected[index]), index
    return num_faults


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
def test_a_fault_on_all_ranks_leaves_no_trace_on_any(ranks2: RankPool, strategy: str) -> None:
    assert min(ranks2.run(fails_on_both_ranks, strategy)) >= 10


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
