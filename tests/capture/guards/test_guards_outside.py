"""Modules that a loss uses and that are none of the model's are guarded as the model is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import same_bits


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).eval()


class Run:
    """A student, a teacher and a criterion."""

    def __init__(self) -> None:
        self.model = net().train()
        self.teacher: nn.Module = net()
        self.criterion: nn.Module = nn.CrossEntropyLoss(torch.ones(3), label_smoothing=0.1)
        self.optim = FusedAdam(self.model.parameters(), lr=0.01)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        loss: Tensor = self.criterion(model(x), target)
        return loss

    def batch(self, index: int) -> Tensor:
        return torch.randn(5, 4, generator=torch.Generator().manual_seed(index))


def swap_data(run: Run) -> None:
    for param in run.teacher.parameters():
        param.data = param.data * 2


REFUSED: dict[str, tuple[Callable[[Run], Any], str]] = {
    "number": (
        lambda run: setattr(run.criterion, "label_smoothing", 0.0),
        r"attribute 'CrossEntropyLoss\.label_smoothing' outside of the model was 0\.1 .* now 0\.0",
    ),
    "criterion": (
        lambda run: setattr(run, "criterion", nn.CrossEntropyLoss()),
        r"attribute 'criterion' of Run\.loss was one CrossEntropyLoss",
    ),
    "weight": (
        lambda run: setattr(run.criterion, "weight", torch.zeros(3)),
        r"buffer 'CrossEntropyLoss\.weight' outside .* was one tensor",
    ),
    "mode": (lambda run: run.teacher.train(), r"module 'Sequential.*in eval mode"),
    "memory": (swap_data, r"'Sequential\.0\.weight' outside of the model was at address"),
    "part": (
        lambda run: run.teacher.add_module("0", nn.Linear(4, 6)),
        r"module 'Sequential\.0' outside of the model was a Linear",
    ),
    "hook": (
        lambda run: run.teacher.register_forward_hook(lambda *args: None),
        r"forward hook .* of module 'Sequential'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_outside_of_the_model_is_guarded(name: str) -> None:
    change, message = REFUSED[name]
    run = Run()
    step = graphfsdp.capture(run.model, run.optim, loss_fn=run.loss, warmup_steps=1)
    for index in range(4):
        step(run.batch(index))
    change(run)
    with pytest.raises(graphfsdp.GuardError, match=message):
        step(run.batch(4))


def test_a_teacher_that_follows_in_place_is_seen_by_replays() -> None:
    losses: list[list[Tensor]] = []
    for scope in ("none", "full_iteration"):
        run = Run()
        torch.manual_seed(1)
        step = graphfsdp.capture(run.model, run.optim, loss_fn=run.loss, scope=scope)
        losses.append([])
        for index in range(14):
            losses[-1].append(step(run.batch(index)))
            run.criterion.eval()  # nobody reads its mode
            with torch.no_grad():
                for mine, its in zip(run.teacher.parameters(), run.model.parameters(), strict=True):
                    mine.lerp_(its, 0.1)
        expected = {"none": "eager", "full_iteration": "replay"}[scope]
        assert step.report().num_calls[expected] >= 10
    assert all(same_bits(one, other) for one, other in zip(*losses, strict=True))


def test_modules_that_the_iteration_makes_are_no_concern() -> None:
    run = Run()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = nn.CrossEntropyLoss()(model(x), nn.Softmax(-1)(x[:, :3]))
        return loss

    step = graphfsdp.capture(run.model, run.optim, loss_fn=loss_fn, warmup_steps=1)
    for index in range(6):
        step(run.batch(index))
    assert step.report().num_calls["replay"] == 4
