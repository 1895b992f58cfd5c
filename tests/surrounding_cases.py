"""Ways in which a loss comes by a value around it, each with a change, and how it is named."""

import enum
import functools
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Loss = Callable[[Any, Tensor], Tensor]
# What makes a loss, a function that changes what it reads, one that takes that back, and a name.
Case = Callable[[], tuple[Loss, Callable[[], Any], Callable[[], Any], str]]


class Mode(enum.Enum):
    """Decides on a factor."""

    ONE = 1
    TWO = 2


class Term:
    """A callable with a weight."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * self.weight


class Factor:
    """A class as a configuration."""

    weight = 1.0


@dataclass(frozen=True)
class Frozen:
    """A configuration that is replaced, never changed."""

    weight: float = 1.0
    epoch: int = 0


class Doubles(torch.autograd.Function):
    """Reads a class attribute in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * Factor.weight


def make_term(weight: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    """Return a function with a closure of its own, and one that changes it."""

    def term(loss: Tensor) -> Tensor:
        return loss * weight

    def change(value: float) -> None:
        nonlocal weight
        weight = value

    return term, change


def sets(target: Any, name: str, new: Any, old: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that set an attribute and set it back."""
    return lambda: setattr(target, name, new), lambda: setattr(target, name, old)


def puts(target: Any, key: Any, new: Any, old: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that set an item and set it back."""
    return lambda: target.__setitem__(key, new), lambda: target.__setitem__(key, old)


def one_of_two_objects() -> Any:
    first, second = Term(1.0), Term(1.0)
    loss_fn: Loss = lambda model, x: first(second(model(x)))  # noqa: E731
    return loss_fn, *sets(first, "weight", 2.0, 1.0), "'weight' of closure variable 'first'"


def the_other_object() -> Any:
    first, second = Term(1.0), Term(1.0)
    loss_fn: Loss = lambda model, x: first(second(model(x)))  # noqa: E731
    return loss_fn, *sets(second, "weight", 2.0, 1.0), "'weight' of closure variable 'second'"


def one_of_two_closures() -> Any:
    (first, change), (second, _) = make_term(1.0), make_term(1.0)
    loss_fn: Loss = lambda model, x: second(first(model(x)))  # noqa: E731
    return loss_fn, lambda: change(2.0), lambda: change(1.0), "closure variable 'weight' of make_t"


def one_of_two_partials() -> Any:
    def weigh(loss: Tensor, *, weight: float) -> Tensor:
        return loss * weight

    first, second = functools.partial(weigh, weight=1.0), functools.partial(weigh, weight=1.0)
    loss_fn: Loss = lambda model, x: second(first(model(x)))  # noqa: E731
    return loss_fn, *puts(first.keywords, "weight", 2.0, 1.0), "keyword 'weight'"


def class_as_configuration() -> Any:
    loss_fn: Loss = lambda model, x: model(x) * Factor.weight  # noqa: E731
    return loss_fn, *sets(Factor, "weight", 2.0, 1.0), "'weight' of global variable 'Factor'"


def backward_of_a_function() -> Any:
    loss_fn: Loss = lambda model, x: Doubles.apply(model(x))  # type: ignore[no-untyped-call]  # noqa: E731
    return loss_fn, *sets(Factor, "weight", 2.0, 1.0), "'weight' of global variable 'Factor'"


def frozen_configuration() -> Any:
    config = types.SimpleNamespace(inner=Frozen())
    loss_fn: Loss = lambda model, x: model(x) * config.inner.weight  # noqa: E731
    changes = sets(config, "inner", replace(config.inner, weight=2.0), Frozen())
    return loss_fn, *changes, "'weight' of 'inner' of closure variable 'config'"


def enum_member() -> Any:
    mode = Mode.ONE

    def change(value: Mode) -> None:
        nonlocal mode
        mode = value

    loss_fn: Loss = lambda model, x: model(x) * (1.0 if mode is Mode.ONE else 2.0)  # noqa: E731
    name = "closure variable 'mode' .*ONE.*TWO"
    return loss_fn, lambda: change(Mode.TWO), lambda: change(Mode.ONE), name


def none_at_first() -> Any:
    scale: Any = None

    def change(value: Any) -> None:
        nonlocal scale
        scale = value

    loss_fn: Loss = lambda model, x: model(x) if scale is None else model(x) * scale  # noqa: E731
    name = r"closure variable 'scale' .* was None .* now 2\.0"
    return loss_fn, lambda: change(2.0), lambda: change(None), name


def number_to_tensor() -> Any:
    config = types.SimpleNamespace(scale=1.0)
    loss_fn: Loss = lambda model, x: (model(x) * config.scale).sum()  # noqa: E731
    changes = sets(config, "scale", torch.ones(3), 1.0)
    return loss_fn, *changes, r"'scale' of closure variable 'config' .* was 1\.0 .* a Tensor"


def number_to_array() -> Any:
    config = types.SimpleNamespace(scale=1.0)
    loss_fn: Loss = lambda model, x: model(x) * float(np.mean(config.scale))  # noqa: E731
    changes = sets(config, "scale", np.ones(3), 1.0)
    return loss_fn, *changes, "'scale' of closure variable 'config'"


def tensor_replaced() -> Any:
    config = types.SimpleNamespace(scale=torch.ones(()))
    loss_fn: Loss = lambda model, x: model(x) * config.scale  # noqa: E731
    changes = sets(config, "scale", torch.ones(()) * 2, config.scale)
    return loss_fn, *changes, "'scale' of closure variable 'config' .*one Tensor.*another Tensor"


def tensor_in_other_memory() -> Any:
    scale, old, new = torch.ones(()), torch.ones(()), torch.ones(()) * 2
    scale.data = old
    loss_fn: Loss = lambda model, x: model(x) * scale  # noqa: E731
    return loss_fn, *sets(scale, "data", new, old), "closure variable 'scale' .* in other memory"


def tensor_in_a_dict() -> Any:
    table = {"a": torch.ones(())}
    loss_fn: Loss = lambda model, x: model(x) * table["a"]  # noqa: E731
    return loss_fn, *puts(table, "a", torch.ones(()) * 2, table["a"]), "'a' of closure variable"


def list_item() -> Any:
    weights = [1.0, 1.0]
    loss_fn: Loss = lambda model, x: model(x) * weights[1]  # noqa: E731
    return loss_fn, *puts(weights, 1, 2.0, 1.0), r"1 of closure variable 'weights' .*1\.0.*2\.0"


def deque_item() -> Any:
    weights = deque([1.0, 1.0])
    loss_fn: Loss = lambda model, x: model(x) * weights[1]  # noqa: E731
    return loss_fn, *puts(weights, 1, 2.0, 1.0), "1 of closure variable 'weights'"


def object_in_a_list() -> Any:
    terms = [Term(1.0), Term(1.0)]

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        for term in terms:
            loss = term(loss)
        return loss

    return loss_fn, *sets(terms[1], "weight", 2.0, 1.0), "'weight' of 1 of closure variable 'terms'"


def nested_tuple() -> Any:
    config = types.SimpleNamespace(weights=(1.0, (1.0, 2)))
    loss_fn: Loss = lambda model, x: model(x) * config.weights[1][0]  # noqa: E731
    return loss_fn, *sets(config, "weights", (1.0, (2.0, 2)), (1.0, (1.0, 2))), "'weights' of"


def array_item() -> Any:
    weights = np.ones(2)
    loss_fn: Loss = lambda model, x: model(x) * float(weights[1])  # noqa: E731
    return loss_fn, *puts(weights, 1, 2.0, 1.0), "the values of closure variable 'weights'"


def numpy_number() -> Any:
    config = types.SimpleNamespace(scale=np.float32(1.0))
    loss_fn: Loss = lambda model, x: model(x) * float(config.scale)  # noqa: E731
    return loss_fn, *sets(config, "scale", np.float32(2.0), np.float32(1.0)), "'scale' of closure"


VALUE_CASES: tuple[Case, ...] = (
    one_of_two_objects,
    the_other_object,
    one_of_two_closures,
    one_of_two_partials,
    class_as_configuration,
    backward_of_a_function,
    frozen_configuration,
    enum_member,
    none_at_first,
    number_to_tensor,
    number_to_array,
    tensor_replaced,
    tensor_in_other_memory,
    tensor_in_a_dict,
    list_item,
    deque_item,
    object_in_a_list,
    nested_tuple,
    array_item,
    numpy_number,
)
