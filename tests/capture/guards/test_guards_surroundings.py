"""What losses, their functions and models read around them is guarded, and the rest is free.

The ways in which code goes to a value are in ways.py.
"""

import argparse
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch._dynamo import utils as dynamo_utils

import graphfsdp
from footgun_net import inputs, start

CPU = torch.device("cpu")
Loss = Callable[[Any, Tensor], Tensor]
FACTOR = UNUSED = 1.0


@dataclass
class Around:
    """A loss or a model, a change of what it reads, what takes that back, and a pattern."""

    loss_fn: Loss | None
    change: Callable[[], Any]
    undo: Callable[[], Any]
    named: str
    model: nn.Module | None = None


def sets(target: Any, name: str, new: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that set an attribute and set it back."""
    old = getattr(target, name)
    return lambda: setattr(target, name, new), lambda: setattr(target, name, old)


def puts(target: Any, key: Any, new: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that set an item and set it back."""
    old = target[key]
    return lambda: target.__setitem__(key, new), lambda: target.__setitem__(key, old)


class Term:
    """A callable with a weight."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * self.weight


class Factor:
    weight = 1.0


class Slots:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


class Doubles(torch.autograd.Function):
    """Reads a class attribute in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * Factor.weight


class Criterion(nn.Module):
    """A module beside the model, whose forward names a class."""

    def forward(self, x: Tensor) -> Tensor:
        return x * Factor.weight


class Hook:
    """A hook that reads a number of its class."""

    scale = 1.0

    @staticmethod
    def scaled(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * Hook.scale


class Reader(nn.Module):
    """Reads what modules may hold beside numbers and tensors."""

    table: ClassVar = {"scale": 1.0}
    shared = torch.ones(())

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_forward_hook(Hook.scaled)
        self.value = value

    def weighted(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    @property
    def factor(self) -> float:
        return type(self).table["scale"]

    def forward(self, x: Tensor) -> Tensor:
        value = self.value
        number = value.weight if hasattr(value, "weight") else value[0].weight
        return self.weighted(self.layer(x).square().mean() * number * self.shared)


def backward_of_a_function() -> Around:
    loss_fn: Loss = lambda model, x: Doubles.apply(model(x))  # type: ignore[no-untyped-call]  # noqa: E731
    return Around(loss_fn, *sets(Factor, "weight", 2.0), "Factor.weight")


def forward_beside_the_model() -> Around:
    criterion = Criterion()
    loss_fn: Loss = lambda model, x: criterion(model(x))  # noqa: E731
    return Around(loss_fn, *sets(Factor, "weight", 2.0), "Factor.weight")


def slots_of_a_model() -> Around:
    value = Slots()
    return Around(None, *sets(value, "weight", 2.0), "'weight' of attribute 'value'", Reader(value))


def held_by_a_class(target: type, name: str, new: Any, named: str) -> Around:
    model = Reader(types.SimpleNamespace(weight=1.0))
    return Around(None, *sets(target, name, new), named, model)


class Trainer:
    """Keeps numbers beside a loss."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.num_calls = 0
        self.iteration = 0

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        self.num_calls += 1
        loss: Tensor = model(x) * self.weight
        return loss

    __call__ = loss


def of_a_trainer() -> Around:
    trainer = Trainer()
    named = "'weight' of Trainer was 1.0"
    return Around(trainer, *sets(trainer, "weight", 2.0), named)


def one_of_two_objects(which: int) -> Around:
    first, second = terms = Term(1.0), Term(1.0)
    loss_fn: Loss = lambda model, x: first(second(model(x)))  # noqa: E731
    named = f"'weight' of closure variable '{('first', 'second')[which]}'"
    return Around(loss_fn, *sets(terms[which], "weight", 2.0), named)


def partial() -> Around:
    def by_keyword(model: nn.Module, x: Tensor, *, weight: float) -> Tensor:
        loss: Tensor = model(x) * weight
        return loss

    loss_fn = functools.partial(by_keyword, weight=1.0)
    named = "keyword 'weight' of a functools.partial"
    return Around(loss_fn, *puts(loss_fn.keywords, "weight", 2.0), named)


def helper(loss: Tensor) -> Tensor:
    return loss * FACTOR


class Names(nn.Module):
    """Names a function and a number of this file, and a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(helper(functional.silu(self.layer(x))).square().mean())

    def mixed(self, loss: Tensor) -> Tensor:
        return loss * FACTOR


def named_by_forward(name: str, new: Any, named: str) -> Around:
    return Around(None, *puts(globals(), name, new), f"global variable {named}", Names())


def tensor_in_other_memory() -> Around:
    scale = torch.ones(())
    loss_fn: Loss = lambda model, x: model(x) * scale  # noqa: E731
    named = "closure variable 'scale' .* in other memory"
    return Around(loss_fn, *sets(scale, "data", torch.ones(()) * 2), named)


def default_argument() -> Around:
    def loss_fn(model: Any, x: Tensor, scale: float = 1.0) -> Tensor:
        loss: Tensor = model(x) * scale
        return loss

    return Around(loss_fn, *sets(loss_fn, "__defaults__", (2.0,)), "the default arguments of")


def code_of_a_function() -> Around:
    def weigh(loss: Tensor) -> Tensor:
        return loss

    new = (lambda loss: loss * 2).__code__
    loss_fn: Loss = lambda model, x: weigh(model(x))  # noqa: E731
    return Around(loss_fn, *sets(weigh, "__code__", new), "the code of .*weigh")


def registered() -> Around:
    @functools.singledispatch
    def weight(kind: object) -> float:
        return 1.0

    def double(kind: int) -> float:
        return 2.0

    def undo() -> None:
        weight.register(int, one)

    def one(kind: int) -> float:
        return 1.0

    undo()
    change = functools.partial(weight.register, int, double)
    loss_fn: Loss = lambda model, x: model(x) * weight(3)  # noqa: E731
    return Around(loss_fn, change, undo, "what is registered for .*weight")


class OfItsClass:
    """Has what its class has, until it gets something of its own."""

    weight = 1.0

    def scale(self) -> float:
        return self.weight

    def loss(self, model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x) * self.scale()
        return loss


def of_its_own() -> Around:
    criterion = OfItsClass()
    change, undo = lambda: setattr(criterion, "weight", 2.0), lambda: delattr(criterion, "weight")
    return Around(criterion.loss, change, undo, "'weight' of .* was missing")


def tensor_replaced() -> Around:
    config = types.SimpleNamespace(scale=torch.ones(()))
    loss_fn: Loss = lambda model, x: model(x) * config.scale  # noqa: E731
    named = "'scale' of closure variable 'config' .*one Tensor.*another Tensor"
    return Around(loss_fn, *sets(config, "scale", torch.ones(()) * 2), named)


CASES: dict[str, Callable[[], Around]] = {
    "object": of_a_trainer,
    "the_other_object": lambda: one_of_two_objects(1),
    "partial": partial,
    "number_of_forward": lambda: named_by_forward(
        "FACTOR", 3.0, r"'FACTOR' .* was 1\.0 .* now 3\.0"
    ),
    "function_of_forward": lambda: named_by_forward(
        "helper", lambda loss: loss, "'helper' .* one function .* another function"
    ),
    "tensor_replaced": tensor_replaced,
    "tensor_in_other_memory": tensor_in_other_memory,
    "default_argument": default_argument,
    "code_of_a_function": code_of_a_function,
    "method_of_a_class": lambda: held_by_a_class(
        Reader, "weighted", lambda self, loss: loss, r"Reader\.weighted was one function"
    ),
    "number_of_a_hooks_class": lambda: held_by_a_class(Hook, "scale", 2.0, "Hook.scale"),
    "slots_of_a_model": slots_of_a_model,
    "backward_of_a_function": backward_of_a_function,
    "forward_beside_the_model": forward_beside_the_model,
    "registered": registered,
    "of_its_own": of_its_own,
}


@pytest.mark.parametrize("name", CASES)
def test_what_changes_around_a_loss_is_named_until_it_is_put_back(name: str) -> None:
    around = CASES[name]()
    step, *_ = start(CPU, around.loss_fn, model=around.model, warmup_steps=1)
    for _ in range(3):
        before = step(inputs(CPU))
    around.change()
    try:
        with pytest.raises(graphfsdp.GuardError, match=around.named) as caught:
            step(inputs(CPU))
    finally:
        around.undo()
    assert "Remedy:" in str(caught.value)
    assert torch.equal(step(inputs(CPU)), before)
    assert step.report().num_captures == 1


def test_unused_functions_unread_numbers_and_a_scheduler_around_the_step_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = types.SimpleNamespace(model=types.SimpleNamespace(alpha=2.0, unread=1.0))
    step, _, optim = start(CPU, lambda model, x: functional.silu(model(x)) * config.model.alpha)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optim)  # wraps optim.step
    monkeypatch.setattr(functional, "celu", functional.relu)
    for _ in range(6):
        step(inputs(CPU))
        scheduler.step()
        config.model.unread += 1.0
    assert step.report().num_calls["replay"] == 2


def test_what_a_function_assigns_itself_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    log = {"calls": 0.0}
    total = 0

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal total
        total += 1
        log["calls"] += 1
        return trainer.loss(model, x)

    step, *_ = start(CPU, loss_fn)
    for index in range(8):
        step(inputs(CPU))
        total = log["calls"] = trainer.num_calls = trainer.iteration = index * 10
        monkeypatch.setattr(f"{__name__}.UNUSED", float(index))
    assert step.phase is graphfsdp.Phase.REPLAY


@dataclass
class Settings:
    """Data, some of which the loss reads."""

    weight: float = 1.0
    epoch: int = 0


@dataclass(frozen=True)
class Frozen:
    """A configuration that is replaced, never changed."""

    weight: float = 1.0
    epoch: int = 0


class Registry(dict[str, float]):
    """A dict with methods of another form, as libraries have them."""

    def get(self, owner: object) -> float:  # type: ignore[override]
        return super().get(type(owner).__name__, 1.0)

    def items(self, owner: object) -> Any:  # type: ignore[override]
        return super().items()

    def copy(self, owner: object) -> Any:  # type: ignore[override]
        return self

    values = items  # type: ignore[assignment]


class Output:
    """What a model of another library returns."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


loss = 0.0


def reads_loss_of_the_output(model: nn.Module, x: Tensor) -> Tensor:
    return Output(model(x)).loss


class Program:
    """Keeps its last loss under the name that the model's output has, too."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.mean = self.loss = 0.0

    def loss_fn(self, model: nn.Module, x: Tensor) -> Tensor:
        return Output(model(x) * self.settings.weight + x.mean()).loss


def test_numbers_that_only_share_a_name_with_an_attribute_may_change() -> None:
    program, settings = Program(), argparse.Namespace(weight=1.0, mean=0.0)

    def by_settings(model: nn.Module, x: Tensor) -> Tensor:
        return Output(model(x) * settings.weight + x.mean()).loss

    for loss_fn in (reads_loss_of_the_output, program.loss_fn, by_settings):
        step, *_ = start(CPU, loss_fn)
        for _ in range(6):
            value = float(step(inputs(CPU)))
            globals()["loss"] = program.loss = program.mean = settings.mean = value
        assert step.phase is graphfsdp.Phase.REPLAY


@pytest.mark.parametrize("compiled", [False, True], ids=["no compile", "after torch.compile"])
def test_a_dict_of_the_model_with_methods_of_its_own_is_seen(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Anything that torch.compile has compiled in this process hides reads, but not these.
    counters = {"frames": {"ok": 1}} if compiled else {}
    monkeypatch.setattr(dynamo_utils, "counters", counters)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x) * model.registry.get(model)
        return loss

    step, model, *_ = start(CPU, loss_fn)
    registry = Registry(Net=1.0)
    model.registry = registry  # type: ignore[assignment]
    for _ in range(5):
        step(inputs(CPU))
    registry["Net"] = 2.0
    with pytest.raises(graphfsdp.GuardError, match="'Net' of attribute 'registry' was"):
        step(inputs(CPU))


class Loop:
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
    program = Loop()
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
