"""A fault at every operator of a replay: how far it is undone, and what comes after it."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from fault_training import REPLAY_WAYS, Training, expected, fail_everywhere, without_kept
from faults import FAULTS, Fault, FaultMode, World
from graphfsdp import CapturedStep, Phase
from graphfsdp.optim import FusedAdam
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
    """The last operators write weights; without copies of these a checkpoint is needed."""
    reference = expected(name)
    training = Training(name, undo_replays=False)
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


@pytest.mark.parametrize("name", ["tiny", "fused", "adamw_clip", "microbatches"])
def test_a_small_replay_is_undone_wherever_it_fails(name: str) -> None:
    """By default, since copies of so few weights cost nothing; gradients are taken off."""
    reference = expected(name)
    training = Training(name)
    for index in range(4):
        training.step(training.batch(index))
    assert training.step.report().undoes_all
    for index in (4, 5):
        got, num_faults = fail_everywhere(training, index, 1, REPLAY_WAYS, gradients=False)
        assert torch.equal(got, reference[index][0])
        assert num_faults > 10
    assert torch.equal(training.step(training.batch(6)), reference[6][0])
    now = without_kept(snapshot(training.model, training.optim))
    assert_same_state(reference[6][1], now, "in the end")
    assert training.step.report().num_captures == 1


def test_large_weights_under_a_small_batch_are_not_copied_unless_asked() -> None:
    """A copy of them would take as long as the rest of the iteration."""
    model = nn.Linear(500, 500)
    optim = FusedAdam(model.parameters())
    choices: dict[bool | str, bool] = {"auto": False, False: False, True: True}
    for chosen, undoes_all in choices.items():
        options: dict[str, Any] = {"warmup_steps": 1, "undo_replays": chosen}
        with graphfsdp.capture(model, optim, loss_fn=summed, **options) as step:
            step(torch.randn(2, 500)), step(torch.randn(2, 500))
            assert step.report().undoes_all is undoes_all
            told = "wherever it fails" if undoes_all else "until weights are written"
            assert told in str(step.report())
    others: list[Any] = ["always", 1, None]
    for other in others:
        with pytest.raises(graphfsdp.ConfigError, match="expected True, False or 'auto'"):
            graphfsdp.capture(model, optim, undo_replays=other)


def summed(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    return loss


class Wide(nn.Module):
    """Little to learn and much to keep for backward, which is dead when weights are written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def test_copies_of_weights_lie_in_memory_that_is_dead_by_then() -> None:
    """Two megabytes of them grow no memory, and nothing that the optimizer reads is under them."""
    torch.manual_seed(0)
    models = [Wide(), Wide()]
    models[1].load_state_dict(models[0].state_dict())
    optims = [FusedAdam(model.parameters(), lr=0.01) for model in models]
    choices: tuple[bool | str, ...] = ("auto", False)
    steps = [
        graphfsdp.capture(model, optim, warmup_steps=1, undo_replays=chosen)
        for model, optim, chosen in zip(models, optims, choices, strict=True)
    ]
    batches = [torch.randn(2000, 300) for _ in range(4)]
    for batch in batches:
        assert torch.equal(steps[0](batch), steps[1](batch))
    with_copies, without = (step.report() for step in steps)
    assert with_copies.undoes_all
    assert not without.undoes_all
    assert with_copies.pool_bytes == without.pool_bytes > 2_000_000
    for after in (False, True):
        mode = FaultMode(count_ops(steps[0], batches[0]) - 1, Fault.ERROR, after=after)
        world = World(models[0], optims[0])
        with pytest.raises(FAULTS), mode:
            steps[0](batches[0])
        assert mode.fired is not None
        world.assert_unchanged("replay", without_gradients=True)
    assert steps[0].phase is Phase.REPLAY


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


@pytest.mark.parametrize("name", ["fused", "eager_optimizer"])
def test_ctrl_c_waits_until_a_replay_is_over(name: str) -> None:
    reference = expected(name)
    training = Training(name)
    for index, (loss, state) in enumerate(reference):
        batch = training.batch(index)
        if index < 4:
            assert torch.equal(training.step(batch), loss)
        else:
            with pytest.raises(KeyboardInterrupt), FaultMode(10, Fault.INTERRUPT, after=True):
                training.step(batch)
        now = without_kept(snapshot(training.model, training.optim))
        assert_same_state(state, now, f"call {index}")
    assert training.step.phase is Phase.REPLAY


@pytest.mark.parametrize("name", ["fused", "adamw_clip", "microbatches", "eager_optimizer"])
def test_undo_replays_takes_back_a_replay_that_fails_anywhere(name: str) -> None:
    """At every operator, the last ones included, gradients and their identity too."""
    reference = expected(name)
    training = Training(name, undo_replays=True)
    for index in range(4):
        assert torch.equal(training.step(training.batch(index)), reference[index][0])
    training.batch(4)
    got, num_faults = fail_everywhere(training, 4, 1 if name == "fused" else 3, REPLAY_WAYS)
    assert torch.equal(got, reference[4][0])
    assert num_faults >= 15
    for param in training.model.parameters():  # a user's own gradient, which the next call takes
        param.grad = torch.full_like(param, 3.0)
    got, _ = fail_everywhere(training, 5, 7, REPLAY_WAYS)
    assert torch.equal(got, reference[5][0])
    assert torch.equal(training.step(training.batch(6)), reference[6][0])
    now = without_kept(snapshot(training.model, training.optim))
    assert_same_state(reference[6][1], now, "in the end")
    assert training.step.phase is Phase.REPLAY
