"""A fault on one rank, or another call on it: what the others hear, and how all of them go on."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from faults_at_operators import FAULTS, Fault, FaultMode, World
from graphfsdp import Phase
from helpers import assert_same_state, quick_garbage_collection, snapshot
from hidden_count import Unseen
from rank_steps import WIDTH, batch, build
from ranks import lost_pool, on_ranks
from sharding_helpers import hybrid_mesh
from time_limits import slowdown


def losses_without_faults(
    strategy: str, num_calls: int, *between: nn.Module, **options: Any
) -> list[Tensor]:
    step, *_ = build(strategy, "none", *between, **options)
    return [step(batch(index)) for index in range(num_calls)]


class LateError(Exception):
    """An ordinary error of a user, after all collectives of the iteration."""


@pytest.mark.parametrize(
    ("ranks", "strategy", "outer"),
    [
        *(("ranks2", strategy, None) for strategy in ("no_shard", "optim_grads_params")),
        ("ranks4", "optim_grads_params", "optim"),
    ],
)
@on_ranks()
def test_an_error_on_one_rank_undoes_the_iteration_on_all(strategy: str, outer: str | None) -> None:
    """In the optimizer's step hook on the last rank: all roll back and go on, groups are intact."""
    axes: dict[str, Any] = {}
    if outer is not None:  # the first rank shares no group with the last one
        axes = {"mesh": hybrid_mesh(), "outer_strategy": outer}
    last = dist.get_world_size() - 1
    expected = losses_without_faults(strategy, 7, axes=axes)
    step, model, optim = build(strategy, "full_iteration", axes=axes)
    fails = {"on": False}

    def hook(*args: object) -> None:
        if fails["on"] and dist.get_rank() == last:
            raise LateError(f"of rank {last}")

    optim.register_step_post_hook(hook)
    for index in range(7):
        if index <= 2:
            world = World(model, optim)
            fails["on"] = True
            message = f"of rank {last}"
            if dist.get_rank() != last:
                who = rf"rank {last} of {last + 1} failed in iteration \d+"
                message = f"{who}: LateError: {message}.*no rank keeps this iteration.*as it was"
            with pytest.raises((LateError, graphfsdp.CaptureError), match=message):
                step(batch(index))
            world.assert_unchanged(f"call {index}")
            fails["on"] = False
        assert torch.equal(step(batch(index)), expected[index]), index
    assert step.report().num_captures == 1


class Reads(nn.Module):
    """Reads a value on the host on rank 1, in one microbatch of two of the capture."""

    def __init__(self, in_microbatch: int) -> None:
        super().__init__()
        self.reads = Unseen(*[False] * (2 * 2 + in_microbatch), True, False)

    def forward(self, x: Tensor) -> Tensor:
        if next(self.reads) and dist.get_rank() == 1:
            x.sum().item()
        return x


@pytest.mark.parametrize(
    ("ranks", "strategy", "in_microbatch"),
    [
        ("ranks2", "optim", 1),
        ("ranks2", "optim_grads_params", 0),
        # The capture ends there, so the ranks have recorded unequally many collectives.
        pytest.param(
            *("gpu_ranks", "optim_grads_params", 1), marks=[pytest.mark.gpu, pytest.mark.multi_gpu]
        ),
    ],
)
@on_ranks()
def test_a_host_read_on_one_rank_rolls_back_all(strategy: str, in_microbatch: int) -> None:
    expected = losses_without_faults(strategy, 7, nn.Identity(), microbatches=2)
    step, model, optim = build(strategy, "full_iteration", Reads(in_microbatch), microbatches=2)
    for index in range(7):
        if index == 2:
            world = World(model, optim)
            words = "reads a value of the iteration on the host"
            if dist.get_rank() != 1:
                words = rf"rank 1 of 2 failed in iteration 3: CaptureError.*{words}"
                words += "(.|\n)*test_rollback_ranks.py(.|\n)*no rank keeps this iteration"
            with pytest.raises(graphfsdp.CaptureError, match=words):
                step(batch(index))
            world.assert_unchanged("the read")
        assert torch.equal(step(batch(index)), expected[index]), index
    assert step.report().num_captures == 1


@on_ranks("ranks2")
def test_a_rank_that_fails_waits_for_one_that_is_busy() -> None:
    """Rank 1 fails at the end of an iteration that rank 0 takes long for."""
    slow = slowdown()
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


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
@on_ranks("ranks2")
def test_a_fault_on_all_ranks_leaves_no_trace_on_any(strategy: str) -> None:
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
    assert num_faults >= 10


@on_ranks("ranks2")
def test_a_rank_that_goes_on_eagerly_is_met_by_replays() -> None:
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
    assert step.phase is Phase.REPLAY
    calls = step.report().num_calls
    assert (calls["replay"], calls.get("eager", 0)) == ((2, 6) if dist.get_rank() else (8, 0))
    step.close()


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
    with lost_pool(2) as pool:
        for text in pool.run(meet_a_new_kind):
            assert text.startswith("rank 0 of 2 replayed iteration 6, for whose batch another")
