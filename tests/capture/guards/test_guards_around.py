"""Tests of the guard of what an iteration uses beside its model: teachers, criteria, tensors."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, same_bits, snapshot


class Around:
    """What a loss function uses beside the model, all of it seeded."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).eval()
        self.criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((1,), 2.0))
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        self.table = {"shift": torch.ones(4), "unused": torch.ones(2)}
        self.unused = torch.ones(3)
        self.other_teacher = nn.Linear(4, 1)
        self.scale = 1.0
        self.anything = object()  # not nothing but data

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = self.criterion(model(x), self.wanted(x)) * self.scale
        return loss

    @torch.no_grad()
    def wanted(self, x: Tensor) -> Tensor:
        wanted: Tensor = self.teacher(x * self.mask + self.table["shift"])
        return wanted.sigmoid()


def by_closure(around: Around) -> Callable[..., Any]:
    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            wanted = around.teacher(x * around.mask + around.table["shift"])
        return around.criterion(model(x), wanted.sigmoid()) * around.scale

    return loss_fn


def start(
    make_loss: Callable[[Around], Callable[..., Any]], **options: Any
) -> tuple[graphfsdp.CapturedStep, nn.Module, FusedAdam, Around, Callable[[], Tensor]]:
    around = Around()
    model = nn.Linear(4, 1)
    optim = FusedAdam(model.parameters(), lr=1e-2)
    step = graphfsdp.capture(model, optim, loss_fn=make_loss(around), **options)
    generator = torch.Generator().manual_seed(12)
    return step, model, optim, around, lambda: torch.randn(8, 4, generator=generator)


CHANGES: dict[str, tuple[Callable[[Around], object], str]] = {
    "mode of a teacher": (lambda a: a.teacher.train(), r"module 'Sequential.*in eval mode"),
    "number of a teacher's layer": (
        lambda a: setattr(a.teacher[2], "forward", a.teacher[2].forward),
        "'Sequential.2.forward'",
    ),
    "weights of a teacher assigned": (
        lambda a: a.teacher.load_state_dict(
            {name: tensor * 2 for name, tensor in a.teacher.state_dict().items()}, assign=True
        ),
        "parameter 'Sequential.0.weight' outside of the model",
    ),
    "weights of a teacher in other memory": (
        lambda a: setattr(a.teacher[0].weight, "data", torch.ones(4, 4)),
        "parameter 'Sequential.0.weight' outside of the model was at address",
    ),
    "a teacher": (lambda a: setattr(a, "teacher", a.other_teacher), "'teacher'"),
    "a criterion": (
        lambda a: setattr(a, "criterion", nn.BCEWithLogitsLoss()),
        "'criterion' .* was one BCEWithLogitsLoss",
    ),
    "a criterion of another class": (
        lambda a: setattr(a, "criterion", nn.MSELoss()),
        "'criterion' .* was a BCEWithLogitsLoss .* now a MSELoss",
    ),
    "a criterion's setting": (
        lambda a: setattr(a.criterion, "reduction", "sum"),
        "attribute 'BCEWithLogitsLoss.reduction' was 'mean' .* now 'sum'",
    ),
    "a criterion's weight": (
        lambda a: setattr(a.criterion, "pos_weight", torch.full((1,), 5.0)),
        "buffer 'BCEWithLogitsLoss.pos_weight' outside of the model was one tensor",
    ),
    "part of a teacher": (
        lambda a: a.teacher.add_module("0", nn.Linear(4, 4)),
        "module 'Sequential.0' outside of the model was a Linear",
    ),
    "a hook of a teacher": (
        lambda a: a.teacher.register_forward_hook(lambda module, args, out: out * 2),
        "forward hook .* of module 'Sequential'",
    ),
    "a tensor": (lambda a: setattr(a, "mask", torch.zeros(4)), "'mask'"),
    "a tensor's memory": (lambda a: setattr(a.mask, "data", torch.zeros(4)), "'mask'"),
    "a number beside tensors": (lambda a: setattr(a, "scale", 3.0), "'scale'"),
}


@pytest.mark.parametrize(
    ("name", "form"), [*zip(CHANGES, itertools.cycle(["method", "closure"]), strict=False)]
)
def test_what_changes_around_the_model_is_refused_by_name(form: str, name: str) -> None:
    change, named = CHANGES[name]
    step, model, optim, around, batch = start(
        by_closure if form == "closure" else lambda around: around.loss
    )
    for _ in range(6):
        step(batch())
    change(around)
    before = snapshot(model, optim)
    with pytest.raises(graphfsdp.GuardError, match=named) as caught:
        step(batch())
    assert "Remedy" in str(caught.value)
    assert_same_state(before, snapshot(model, optim))


def test_what_does_not_matter_may_change() -> None:
    step, model, _, around, batch = start(by_closure)
    for _ in range(6):
        step(batch())
    around.unused = torch.zeros(3)
    around.table["unused"] = torch.zeros(2)
    around.other_teacher.train()
    with torch.no_grad():
        around.mask.zero_()  # replays see it
    around.mask = around.mask.view(4)  # another object, the same memory
    x = batch()
    with torch.no_grad():
        expected = by_closure(around)(model, x)
    assert torch.equal(step(x), expected)
    assert step.report().num_calls["replay"] == 3


def test_an_evaluation_follows_a_teachers_mode(caplog: pytest.LogCaptureFixture) -> None:
    step, model, _, around, batch = start(by_closure)
    x = batch()
    for _ in range(3):
        step.evaluate(x)
    around.criterion.reduction = "sum"
    with caplog.at_level(logging.INFO, "graphfsdp"), torch.no_grad():
        assert torch.equal(step.evaluate(x), by_closure(around)(model, x))
    assert "BCEWithLogitsLoss.reduction" in caplog.text


def test_a_teacher_that_follows_in_place_is_seen_by_replays() -> None:
    losses: list[list[Tensor]] = []
    for scope in ("none", "full_iteration"):
        step, model, _, around, batch = start(lambda around: around.loss, scope=scope)
        losses.append([])
        for _ in range(14):
            losses[-1].append(step(batch()))
            around.criterion.eval()  # nobody reads its mode
            with torch.no_grad():
                followers = zip(around.teacher[2].parameters(), model.parameters(), strict=True)
                for mine, its in followers:
                    mine.lerp_(its, 0.1)
        expected = {"none": "eager", "full_iteration": "replay"}[scope]
        assert step.report().num_calls[expected] >= 10
    assert all(same_bits(one, other) for one, other in zip(*losses, strict=True))


def test_modules_that_the_iteration_makes_are_no_concern() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        return nn.BCEWithLogitsLoss()(model(x), nn.Softmax(-1)(x)[:, :1])

    step, *_, batch = start(lambda around: loss_fn, warmup_steps=1)
    for _ in range(6):
        step(batch())
    assert step.report().num_calls["replay"] == 4
