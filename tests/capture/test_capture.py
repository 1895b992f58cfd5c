"""`graphfsdp.capture` and the captured step: outputs, phases, counts, arguments."""

import sys
from types import FrameType

import pytest
import torch
from torch import Tensor

import graphfsdp
from graphfsdp import Phase
from helpers import (
    assert_same_run,
    assert_same_states,
    make_optimizer,
    no_host_sync,
    run,
    set_lr,
    snapshot,
)
from make_step import make_step
from zoo import ZOO


def test_recording_may_be_the_first_call_without_the_optimizer() -> None:
    """On a CPU: libraries of CUDA initialise themselves in a warm-up."""
    cpu = torch.device("cpu")
    expected = run(ZOO["mlp"], "none", cpu, num_steps=5)
    got = run(ZOO["mlp"], "forward_backward", cpu, num_steps=5, warmup_steps=0)
    assert_same_run(expected, got)


def test_phases_follow_one_another(device: torch.device) -> None:
    step, _, _, next_batch = make_step(device, warmup_steps=2)
    seen = []
    for _ in range(4):
        seen.append(step.phase)
        step(*next_batch())
    assert seen == [Phase.WARMUP, Phase.WARMUP, Phase.WARMUP, Phase.REPLAY]
    step.close()
    assert step.phase is Phase.CLOSED


@pytest.mark.parametrize("num_calls", [0, 1, 4, 6])
def test_closing_is_idempotent_and_final(num_calls: int, device: torch.device) -> None:
    """So is to leave the context, also by an error."""
    step, model, _, next_batch = make_step(device)
    assert step.__enter__() is step
    for _ in range(num_calls):
        step(*next_batch())
    with pytest.raises(KeyError), step:
        raise KeyError
    step.close()
    assert step.phase is Phase.CLOSED
    with pytest.raises(graphfsdp.PhaseError, match=r"closed.*capture again"):
        step(*next_batch())
    assert step.report().phase == "closed"
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_two_steps_over_one_model_take_turns(device: torch.device) -> None:
    """Two losses, each with an optimizer of its own, as adversarial training has them."""

    def train(scope: str) -> list[dict[str, Tensor]]:
        first, model, optim, next_batch = make_step(device, scope=scope, max_grad_norm=0.1)
        other = make_optimizer("sgd", model.parameters(), device)
        second = graphfsdp.capture(
            model, other, scope=scope, loss_fn=lambda model, x: model(-x).exp()
        )
        found = []
        for _ in range(14):
            first(*next_batch())
            second(*next_batch())
            found += [snapshot(model, optim), snapshot(model, other)]
        return found

    assert_same_states(train("none"), train("full_iteration"))


def test_seeding_between_replays_reaches_them(device: torch.device) -> None:
    def losses(scope: str) -> list[Tensor]:
        step, _, _, next_batch = make_step(device, scope=scope)
        found = []
        for index in range(10):
            torch.manual_seed(index // 2)
            found.append(step(*next_batch()))
        return found

    for one, other in zip(losses("none"), losses("full_iteration"), strict=True):
        assert torch.equal(one, other)


def test_a_replay_runs_no_python_of_model_autograd_or_optimizer(device: torch.device) -> None:
    step, _, _, next_batch = make_step(device, "gpt", max_grad_norm=1.0)
    for _ in range(5):
        step(*next_batch())
    batch = next_batch()
    seen: set[str] = set()

    def hook(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    sys.setprofile(hook)
    try:
        step(*batch)
    finally:
        sys.setprofile(None)
    assert any(name.endswith("runner.py:Runner.run") for name in seen)
    engine = ("/torch/autograd/__init__.py", "/torch/autograd/function.py")
    model_and_optimizer = ("/torch/nn/", "/torch/optim/", "zoo.py", "FusedAdam.step")
    forbidden = (*engine, *model_and_optimizer, "iteration.py")
    assert not [name for name in seen if any(part in name for part in forbidden)]


@pytest.mark.parametrize("optimizer", ["fused_adam", "adamw", "sgd"])
def test_a_replay_reads_nothing_on_the_host(optimizer: str, device: torch.device) -> None:
    step, _, optim, next_batch = make_step(device, "gpt", optimizer, max_grad_norm=1.0)
    for _ in range(5):
        step(*next_batch())
    for index in range(3):
        batch = next_batch()
        set_lr(optim, 0.01 / (index + 1))
        with no_host_sync(device):
            step(*batch)
