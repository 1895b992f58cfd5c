"""What the user's functions read around them is guarded, whatever way leads to it."""

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from footgun_net import inputs, start
from graphfsdp.optim import FusedAdam
from guard_net import NOT_REFUSED_YET
from surrounding_cases import VALUE_CASES, Case, Frozen, Term
from surrounding_objects_cases import OBJECT_CASES, Schedule, Slots

CPU = torch.device("cpu")


FURTHER = {
    *("backward_of_a_function", "behind_a_method", "behind_a_property", "context_variable"),
    *("deep_chain", "environment_variable", "frozen_configuration", "handed_on"),
    *("imported_inside", "length_of_a_long_list", "made_up_attribute", "method_of_the_owner"),
    *("object_in_a_list",),
}
CASES = [
    pytest.param(case, id=case.__name__, marks=[NOT_REFUSED_YET] * (case.__name__ in FURTHER))
    for case in (*VALUE_CASES, *OBJECT_CASES)
]


@pytest.mark.parametrize("case", CASES)
def test_what_changes_around_a_loss_is_named_until_it_is_put_back(case: Case) -> None:
    loss_fn, change, undo, name = case()
    step, *_ = start(CPU, loss_fn, warmup_steps=1)
    for _ in range(3):
        before = step(inputs(CPU))
    change()
    try:
        with pytest.raises(graphfsdp.GuardError, match=name) as caught:
            step(inputs(CPU))
    finally:
        undo()
    assert "Remedy:" in str(caught.value)
    assert torch.equal(step(inputs(CPU)), before)
    assert step.report().num_captures == 1


class Reader(nn.Module):
    """Reads what modules may hold beside numbers and tensors."""

    table: ClassVar = {"scale": 1.0}
    shared = torch.ones(())

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.value = value

    def weighted(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    @property
    def factor(self) -> float:
        """Of a class's attribute."""
        return type(self).table["scale"]

    def forward(self, x: Tensor) -> Tensor:
        """[B, 4] to []."""
        value = self.value
        number = value.weight if hasattr(value, "weight") else value[0].weight
        return self.weighted(self.layer(x).square().mean() * number * self.shared)


def trained(value: Any) -> tuple[Any, Reader]:
    torch.manual_seed(0)
    model = Reader(value)
    model.layer.register_forward_hook(Hook.scaled)
    step = graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.0), warmup_steps=1)
    for _ in range(3):
        step(inputs(CPU))
    return step, model


class Hook:
    """A hook that reads a number of its class."""

    scale = 1.0

    @staticmethod
    def scaled(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * Hook.scale


@NOT_REFUSED_YET
@pytest.mark.parametrize(
    ("make", "attribute", "name"),
    [
        (Slots, "weight", "'weight' of attribute 'value'"),
        (Schedule, "_weight", "'_weight' of attribute 'value'"),
        (
            lambda: [types.SimpleNamespace(weight=1.0, lock=object())],
            "weight",
            "'weight' of 0 of attribute",
        ),
    ],
)
def test_objects_of_a_model_that_are_more_than_data(
    make: Callable[[], Any], attribute: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = make()
    step, _ = trained(value)
    monkeypatch.setattr(value[0] if isinstance(value, list) else value, attribute, 2.0)
    with pytest.raises(graphfsdp.GuardError, match=name):
        step(inputs(CPU))


@pytest.mark.parametrize(
    ("target", "attribute", "new", "name"),
    [
        pytest.param(
            *(Reader, "table", {"scale": 2.0}, r"'scale' of Reader\.table"), marks=NOT_REFUSED_YET
        ),
        (Reader, "shared", torch.zeros(()), r"Reader\.shared was one Tensor"),
        (Reader, "weighted", lambda self, loss: loss, r"Reader\.weighted was one function"),
        (Hook, "scale", 2.0, "'scale' of global variable 'Hook'"),
    ],
)
def test_what_classes_of_modules_and_hooks_hold_is_guarded(
    target: type, attribute: str, new: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _ = trained(types.SimpleNamespace(weight=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(target, attribute, new)
        with pytest.raises(graphfsdp.GuardError, match=name):
            step(inputs(CPU))
    step(inputs(CPU))


class Program:
    """Keeps what training loops keep, beside a loss that logs."""

    def __init__(self) -> None:
        self.config = {"weight": 1.0, "epoch": 0}
        self.settings = Frozen()
        self.history: list[Tensor] = []
        self.term = Term(1.0)
        self.best = self.num_steps = 0.0
        self.last: Tensor | None = None

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = self.term(model(x)) * self.config["weight"] * self.settings.weight
        self.last = loss.detach()
        self.history.append(self.last)
        return loss


def test_what_a_training_loop_keeps_beside_a_loss_may_change() -> None:
    program = Program()
    step, *_ = start(CPU, program.loss, lr=0.1, warmup_steps=1)
    for index in range(8):
        loss = step(inputs(CPU))
        program.num_steps += 1
        program.best = min(program.best, float(loss))
        program.history.append(loss)
        program.settings = replace(program.settings, epoch=index)
        program.config = dict(program.config)  # an equal one
    assert step.report().num_calls["replay"] == 6


def test_objects_that_make_up_others_for_ever_do_not_stop_a_capture() -> None:
    class Endless:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Endless()

    endless, loop = Endless(), types.SimpleNamespace(weight=1.0)
    loop.next = loop

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        assert endless.next.next.next is not None
        loss: Tensor = model(x) * loop.next.next.weight
        return loss

    step, *_ = start(CPU, loss_fn, warmup_steps=1)
    for _ in range(4):
        step(inputs(CPU))
    assert step.phase is graphfsdp.Phase.REPLAY
