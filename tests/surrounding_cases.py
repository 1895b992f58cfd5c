"""Ways in which a loss comes by a value around it, each with a change, and how it is named."""

import enum
import functools
import operator
import types
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import graphfsdp
from footgun_net import inputs, start

CPU = torch.device("cpu")
Loss = Callable[[Any, Tensor], Tensor]
Weigh = Callable[[Tensor, Any], Tensor]
FACTOR = 1.0


@dataclass
class Around:
    """A loss or a model, a change of what it reads, what takes that back, and a pattern."""

    loss_fn: Loss | None
    change: Callable[[], Any]
    undo: Callable[[], Any]
    named: str
    model: nn.Module | None = None


Case = Callable[[], Around]


def assert_named_until_put_back(case: Case) -> None:
    around = case()
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


def sets(target: Any, name: str, new: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that set an attribute and set it back."""
    old = getattr(target, name)
    return lambda: setattr(target, name, new), lambda: setattr(target, name, old)


def puts(target: Any, key: Any, new: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that set an item and set it back."""
    old = target[key]
    return lambda: target.__setitem__(key, new), lambda: target.__setitem__(key, old)


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


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


class Registry(dict[str, float]):
    """A dict with methods of another form, as libraries have them."""

    def get(self, owner: object) -> float:  # type: ignore[override]
        return super().get(type(owner).__name__, 1.0)

    def items(self, owner: object) -> Any:  # type: ignore[override]
        return super().items()

    def copy(self, owner: object) -> Any:  # type: ignore[override]
        return self

    values = items  # type: ignore[assignment]


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


def weighed(
    read: Callable[[], Any], changes: tuple[Callable[[], Any], Callable[[], Any]], named: str
) -> Around:
    return Around(lambda model, x: model(x) * read(), *changes, named)


def learning_rate_of_others() -> Around:
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    changes = puts(other.param_groups[0], "lr", 0.2)
    return weighed(lambda: other.param_groups[0]["lr"], changes, "'lr' of group 0 of")


def of_a_scheduler(name: str, read: Callable[[Any], float]) -> Around:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    old = getattr(scheduler, name)
    changes = scheduler.step, lambda: setattr(scheduler, name, old)
    return weighed(
        lambda: read(scheduler) + 1, changes, f"'{name}' of closure variable 'scheduler'"
    )


def held_by_a_class(target: type, name: str, new: Any, named: str) -> Around:
    model = Reader(types.SimpleNamespace(weight=1.0))
    return Around(None, *sets(target, name, new), named, model)


def of_a_config(old: Any, new: Any, named: str, weigh: Weigh = operator.mul) -> Around:
    config = types.SimpleNamespace(scale=old)
    loss_fn: Loss = lambda model, x: weigh(model(x), config.scale)  # noqa: E731
    return Around(loss_fn, *sets(config, "scale", new), named)


def of_a_variable(old: Any, new: Any, named: str, weigh: Weigh) -> Around:
    scale = old

    def change(value: Any) -> None:
        nonlocal scale
        scale = value

    loss_fn: Loss = lambda model, x: weigh(model(x), scale)  # noqa: E731
    return Around(loss_fn, lambda: change(new), lambda: change(old), named)


def of_an_item(items: Any, key: Any, new: Any, named: str, weigh: Weigh = operator.mul) -> Around:
    loss_fn: Loss = lambda model, x: weigh(model(x), items[key])  # noqa: E731
    return Around(loss_fn, *puts(items, key, new), named)


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


def cached_function() -> Around:
    config = types.SimpleNamespace(scale=1.0)
    scale = functools.lru_cache(lambda: config.scale)
    loss_fn: Loss = lambda model, x: model(x) * scale()  # noqa: E731
    return Around(loss_fn, *sets(config, "scale", 2.0), "'scale' of closure variable 'config'")


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


def attribute_of_a_function() -> Around:
    def weigh(loss: Tensor) -> Tensor:
        result: Tensor = loss * getattr(weigh, "scale")  # noqa: B009
        return result * weigh.factor  # type: ignore[attr-defined, no-any-return]

    weigh.scale = weigh.factor = 1.0  # type: ignore[attr-defined]
    loss_fn: Loss = lambda model, x: weigh(model(x))  # noqa: E731
    return Around(loss_fn, *sets(weigh, "factor", 2.0), "'factor' of closure variable 'weigh'")


CASES: dict[str, Case] = {
    "the_other_object": lambda: one_of_two_objects(1),
    "partial": partial,
    "number_of_forward": lambda: named_by_forward(
        "FACTOR", 3.0, r"'FACTOR' .* was 1\.0 .* now 3\.0"
    ),
    "function_of_forward": lambda: named_by_forward(
        "helper", lambda loss: loss, "'helper' .* one function .* another function"
    ),
    "object": of_a_trainer,
    "enum_member": lambda: of_a_variable(
        Mode.ONE,
        Mode.TWO,
        "closure variable 'scale' .*ONE.*TWO",
        lambda loss, mode: loss * (1.0 if mode is Mode.ONE else 2.0),
    ),
    "numpy_number": lambda: of_a_config(
        np.float32(1.0),
        np.float32(2.0),
        "'scale' of closure",
        lambda loss, scale: loss * float(scale),
    ),
    "number_to_array": lambda: of_a_config(
        1.0,
        np.ones(3),
        "'scale' of closure variable 'config'",
        lambda loss, scale: loss * float(np.mean(scale)),
    ),
    "tensor_replaced": lambda: of_a_config(
        torch.ones(()),
        torch.ones(()) * 2,
        "'scale' of closure variable 'config' .*one Tensor.*another Tensor",
    ),
    "tensor_in_other_memory": tensor_in_other_memory,
    "tensor_in_a_dict": lambda: of_an_item(
        {"a": torch.ones(())}, "a", torch.ones(()) * 2, "'a' of closure variable"
    ),
    "deque_item": lambda: of_an_item(deque([1.0, 1.0]), 1, 2.0, "1 of closure variable 'items'"),
    "user_dict_item": lambda: of_an_item(UserDict(a=1.0), "a", 2.0, "closure variable 'items'"),
    "bytearray_item": lambda: of_an_item(bytearray(b"ab"), 1, 3, "closure variable 'items'"),
    "global_by_its_name": lambda: weighed(
        lambda: globals()["FACTOR"], puts(globals(), "FACTOR", 2.0), "global variable 'FACTOR'"
    ),
    "learning_rate_of_others": learning_rate_of_others,
    "last_epoch": lambda: of_a_scheduler("last_epoch", lambda scheduler: scheduler.last_epoch),
    "last_learning_rate": lambda: of_a_scheduler(
        "_last_lr", lambda scheduler: scheduler.get_last_lr()[0]
    ),
    "array_item": lambda: of_an_item(
        np.ones(2),
        1,
        2.0,
        "the values of closure variable 'items'",
        lambda loss, item: loss * float(item),
    ),
    "cached_function": cached_function,
    "default_argument": default_argument,
    "code_of_a_function": code_of_a_function,
    "attribute_of_a_function": attribute_of_a_function,
    "method_of_a_class": lambda: held_by_a_class(
        Reader, "weighted", lambda self, loss: loss, r"Reader\.weighted was one function"
    ),
    "number_of_a_hooks_class": lambda: held_by_a_class(Hook, "scale", 2.0, "Hook.scale"),
}
