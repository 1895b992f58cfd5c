"""A fault at every operator of a warm-up, a capture, a replay: how far it is undone, and then."""

import itertools

import pytest
import torch
from torch import Tensor

import graphfsdp
from fault_training import CASES, Training, expected, fail_everywhere, without_kept
from faults_at_operators import FAULTS, Fault, FaultMode
from graphfsdp import CapturedStep, Phase
from helpers import assert_same_state, snapshot


def fail_replay_everywhere(training: Training, index: int) -> int:
    """Replay with a fault at every operator, until one breaks the step.

    Returns:
        How many were undone.
    """
    batch = training.batch(index)
    world = training.world()
    for position in itertools.count():
        fault = (Fault.ERROR, Fault.OUT_OF_MEMORY)[position % 2]
        mode = FaultMode(position, fault, after=position % 3 == 0)
        with pytest.raises(FAULTS) as caught, mode:
            training.step(batch)
        if training.step.phase is Phase.BROKEN:
            assert "stopped while it updated weights" in caught.value.__notes__[-1]
            return position
        when = f"replay, {fault.value} in {mode.fired} at {position}"
        if mode.num_ops <= 2:
            continue  # the batch was still being copied in
        assert "was undone" in caught.value.__notes__[-1], when
        world.assert_unchanged(when, without_gradients=True)
        assert all(param.grad is None for param in training.model.parameters()), when
    raise AssertionError


@pytest.mark.parametrize("name", ["fused", "adamw_clip", "microbatches"])
def test_a_replay_is_undone_up_to_the_optimizer_and_refused_after_it(name: str) -> None:
    """The last operators write weights; after these a checkpoint is needed."""
    reference = expected(name)
    training = Training(name)
    for index in range(4):
        training.step(training.batch(index))
    num_ops = count_ops(training.step, training.batch(4))
    world = training.world()
    put_back = world.put_back()
    num_undone = fail_replay_everywhere(training, 5)
    assert num_undone >= num_ops - 12, "more than the optimizer step could not be undone"
    with pytest.raises(graphfsdp.PhaseError, match=r"broken: .*load model and optimizer"):
        training.step(training.batch(5))
    training.step.close()
    put_back()
    training.step = graphfsdp.capture(training.model, training.optim, **training.options)
    for index in (5, 6):
        assert torch.equal(training.step(training.batch(index)), reference[index][0])


def count_ops(step: CapturedStep, batch: Tensor) -> int:
    """Replay, and return how many operators that takes."""
    mode = FaultMode(-1, Fault.ERROR, after=False)
    with mode:
        step(batch)
    return mode.num_ops


def test_a_replay_without_the_optimizer_is_always_undone() -> None:
    training = Training("eager_optimizer")
    for index in range(4):
        training.step(training.batch(index))
    batch = training.batch(4)
    world = training.world()
    num_undone = 0
    for position in itertools.count(2):
        mode = FaultMode(position, Fault.ERROR, after=False)
        with pytest.raises(FAULTS) as caught, mode:
            training.step(batch)
        if not hasattr(caught.value, "__notes__"):
            break  # the optimizer, which is no part of the replay
        world.assert_unchanged(f"{mode.fired} at {position}", without_gradients=True)
        num_undone += 1
    assert num_undone > 15
    assert training.step.phase is Phase.REPLAY


@pytest.mark.parametrize("name", CASES)
def test_a_fault_at_any_operator_of_warm_up_and_capture_leaves_no_trace(name: str) -> None:
    reference = expected(name)
    training = Training(name)
    num_faults = []
    for index, (loss, state) in enumerate(reference):
        if index <= 2:  # two warm-ups and the capture
            # Of the larger models, whose recordings take longer, a part.
            stride = 1 if name == "tiny" else (7, 7, 17)[index]
            got, count = fail_everywhere(training, index, stride)
            num_faults.append(count)
        else:
            got = training.step(training.batch(index))
        assert torch.equal(got, loss), index
        now = without_kept(snapshot(training.model, training.optim))
        assert_same_state(state, now, f"call {index}")
    assert min(num_faults) >= 8, num_faults
    assert training.step.report().num_captures == 1
    training.step.close()
