"""Values that are read far from the functions, or lie elsewhere: each change is named."""

import collections
import contextvars
import functools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surrounding_cases import (
    Around,
    Factor,
    Loss,
    Reader,
    Slots,
    Term,
    assert_named_until_put_back,
    puts,
    sets,
    weighed,
)


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


class Schedule:
    """Tells its weight by a method and a property, and holds more than data."""

    def __init__(self) -> None:
        self._weight = 1.0
        self.lock = object()

    @property
    def weight(self) -> float:
        return self._weight

    def now(self) -> float:
        return self._weight


class Made:
    """Makes its attributes up, as configurations of libraries do."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.__dict__["content"] = content

    def __getattr__(self, name: str) -> Any:
        value = self.content[name]
        return Made(value) if isinstance(value, dict) else value


def backward_of_a_function() -> Around:
    loss_fn: Loss = lambda model, x: Doubles.apply(model(x))  # type: ignore[no-untyped-call]  # noqa: E731
    return Around(loss_fn, *sets(Factor, "weight", 2.0), "Factor.weight")


def forward_beside_the_model() -> Around:
    criterion = Criterion()
    loss_fn: Loss = lambda model, x: criterion(model(x))  # noqa: E731
    return Around(loss_fn, *sets(Factor, "weight", 2.0), "Factor.weight")


def behind_a_property() -> Around:
    schedule = Schedule()
    named = "'_weight' of closure variable 'schedule'"
    return weighed(lambda: schedule.weight, sets(schedule, "_weight", 2.0), named)


def slots_of_a_model() -> Around:
    value = Slots()
    return Around(None, *sets(value, "weight", 2.0), "'weight' of attribute 'value'", Reader(value))


def made_up_attribute() -> Around:
    config = Made({"inner": {"weight": 1.0}})
    loss_fn: Loss = lambda model, x: model(x) * config.inner.weight  # noqa: E731
    change = puts(config.content["inner"], "weight", 2.0)
    return Around(loss_fn, *change, "'weight' of 'inner' of 'content' of cl")


def deep_chain() -> Around:
    config = types.SimpleNamespace(scale=1.0)
    call: Callable[[Tensor], Tensor] = lambda loss: loss * config.scale  # noqa: E731
    for _ in range(12):
        call = functools.partial(lambda inner, loss: inner(loss), call)
    loss_fn: Loss = lambda model, x: call(model(x))  # noqa: E731
    return Around(loss_fn, *sets(config, "scale", 2.0), "'scale' of closure variable 'config'")


def environment_variable() -> Around:
    name = "SURROUNDING_SCALE"
    loss_fn: Loss = lambda model, x: model(x) * float(os.getenv("SURROUNDING_SCALE", "1"))  # noqa: E731
    change, undo = lambda: os.environ.update({name: "2.0"}), lambda: os.environ.pop(name)
    return Around(loss_fn, change, undo, f"environment variable '{name}' was missing .* b'2.0'")


def settings_module() -> types.ModuleType:
    module = sys.modules["surrounding_settings"] = types.ModuleType("surrounding_settings")
    module.__file__ = __file__
    module.SCALE = 1.0  # type: ignore[attr-defined]
    return module


def loaded_module_by_its_name() -> Around:
    return weighed(
        lambda: sys.modules["surrounding_settings"].SCALE,
        sets(settings_module(), "SCALE", 2.0),
        "'SCALE' of module 'surrounding_settings'",
    )


def imported_inside() -> Around:
    module = settings_module()

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        from surrounding_settings import SCALE  # type: ignore[import-not-found]

        loss: Tensor = model(x) * SCALE
        return loss

    return Around(loss_fn, *sets(module, "SCALE", 2.0), "'SCALE' of module 'surrounding_settings'")


def context_variable() -> Around:
    scale = contextvars.ContextVar("scale", default=1.0)
    loss_fn: Loss = lambda model, x: model(x) * scale.get()  # noqa: E731
    name = r"the value of closure variable 'scale' .* was 1\.0 .* now 2\.0"
    return Around(loss_fn, lambda: scale.set(2.0), lambda: scale.set(1.0), name)


def length_of_a_long_list() -> Around:
    items = [1.0] * 20_000
    loss_fn: Loss = lambda model, x: model(x) * len(items)  # noqa: E731
    named = "the length of closure variable 'items'"
    return Around(loss_fn, lambda: items.append(1.0), items.pop, named)


class Told:
    """Tells its weight without an object of it."""

    weight = 1.0

    @classmethod
    def by_class(cls) -> float:
        return cls.weight


def of_this_thread() -> Around:
    held = threading.local()
    held.weight = 1.0
    return weighed(lambda: held.weight, sets(held, "weight", 2.0), "'weight' of .* 'held'")


def behind_a_proxy() -> Around:
    schedule = Term(1.0)
    held = weakref.proxy(schedule)
    return weighed(lambda: held.weight, sets(schedule, "weight", 2.0), "'weight' of .* 'held'")


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
    return weighed(lambda: weight(3), (change, undo), "what is registered for .*weight")


def of_a_dict_elsewhere(make: Callable[[dict[str, float]], Any]) -> Around:
    table = {"weight": 1.0}
    held = make(table)
    return weighed(lambda: held["weight"], puts(table, "weight", 2.0), "'weight' of .* 'held'")


def of_a_module_without_a_file() -> Around:
    made = types.ModuleType("made")
    made.weight = 1.0  # type: ignore[attr-defined]
    return weighed(lambda: made.weight, sets(made, "weight", 2.0), "'weight' of .* 'made'")


def typed(filename: str) -> Around:
    names: dict[str, Any] = {"table": {"weight": 1.0}}
    code = "def loss_fn(model, x): return model(x) * table['weight']"
    exec(compile(code, filename, "exec"), names)
    changes = puts(names["table"], "weight", 2.0)
    return Around(names["loss_fn"], *changes, "'weight' of global variable 'table'")


class OfItsClass:
    """Has what its class has, until it gets something of its own."""

    weight = 1.0

    def scale(self) -> float:
        return self.weight

    def loss(self, model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x) * self.scale()
        return loss


def of_its_own(name: str, value: Any) -> Around:
    criterion = OfItsClass()
    return Around(
        criterion.loss,
        lambda: setattr(criterion, name, value),
        lambda: delattr(criterion, name),
        f"'{name}' of .* was missing",
    )


CASES: dict[str, Callable[[], Around]] = {
    "backward_of_a_function": backward_of_a_function,
    "forward_beside_the_model": forward_beside_the_model,
    "behind_a_property": behind_a_property,
    "made_up_attribute": made_up_attribute,
    "deep_chain": deep_chain,
    "environment_variable": environment_variable,
    "imported_inside": imported_inside,
    "loaded_module_by_its_name": loaded_module_by_its_name,
    "context_variable": context_variable,
    "length_of_a_long_list": length_of_a_long_list,
    "slots_of_a_model": slots_of_a_model,
    "of_this_thread": of_this_thread,
    "behind_a_proxy": behind_a_proxy,
    "registered": registered,
    "chain_of_dicts": lambda: of_a_dict_elsewhere(lambda table: collections.ChainMap({}, table)),
    "proxy_of_a_dict": lambda: of_a_dict_elsewhere(types.MappingProxyType),
    "method_of_a_named_class": lambda: weighed(
        lambda: Told.by_class(), sets(Told, "weight", 2.0), r"Told\.weight"
    ),
    "of_its_own": lambda: of_its_own("weight", 2.0),
    "of_a_module_without_a_file": of_a_module_without_a_file,
    "typed_at_a_prompt": lambda: typed("<stdin>"),
    "given_as_a_text": lambda: typed("<string>"),
    "typed_in_a_notebook": lambda: typed("<ipython-input-3-1a2b3c>"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_value_that_a_replay_would_not_follow(name: str) -> None:
    assert_named_until_put_back(CASES[name])
