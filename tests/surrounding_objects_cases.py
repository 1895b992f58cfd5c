"""Ways in which a loss comes by a value through objects, functions and the environment."""

import contextvars
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from surrounding_cases import Case, Loss, puts, sets


class Slots:
    """Has no dict."""

    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


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


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for the body."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def object_without_dict() -> Any:
    slots = Slots()
    loss_fn: Loss = lambda model, x: model(x) * slots.weight  # noqa: E731
    return loss_fn, *sets(slots, "weight", 2.0, 1.0), "'weight' of closure variable 'slots'"


def behind_a_property() -> Any:
    schedule = Schedule()
    loss_fn: Loss = lambda model, x: model(x) * schedule.weight  # noqa: E731
    return loss_fn, *sets(schedule, "_weight", 2.0, 1.0), "'_weight' of closure variable 'schedule'"


def behind_a_method() -> Any:
    schedule = Schedule()
    loss_fn: Loss = lambda model, x: model(x) * schedule.now()  # noqa: E731
    return loss_fn, *sets(schedule, "_weight", 2.0, 1.0), "'_weight' of closure variable 'schedule'"


def handed_on() -> Any:
    schedule = Schedule()

    def weigh(loss: Tensor, known_as: Any) -> Tensor:
        result: Tensor = loss * known_as._weight
        return result

    loss_fn: Loss = lambda model, x: weigh(model(x), schedule)  # noqa: E731
    return loss_fn, *sets(schedule, "_weight", 2.0, 1.0), "'_weight' of closure variable 'schedule'"


def made_up_attribute() -> Any:
    config = Made({"inner": {"weight": 1.0}})
    loss_fn: Loss = lambda model, x: model(x) * config.inner.weight  # noqa: E731
    return loss_fn, *puts(config.content["inner"], "weight", 2.0, 1.0), "'weight' of 'inner' of cl"


def method_of_the_owner() -> Any:
    class Trainer:
        def __init__(self) -> None:
            self.config = types.SimpleNamespace(inner=types.SimpleNamespace(weight=1.0))

        def weight(self) -> Any:
            return self.config.inner.weight

        def loss(self, model: Any, x: Tensor) -> Tensor:
            loss: Tensor = model(x) * self.weight()
            return loss

    trainer = Trainer()
    return trainer.loss, *sets(trainer.config.inner, "weight", 2.0, 1.0), "'weight' of 'inner' of"


def deep_chain() -> Any:
    config = types.SimpleNamespace(scale=1.0)
    call: Callable[[Tensor], Tensor] = lambda loss: loss * config.scale  # noqa: E731
    for _ in range(12):
        call = functools.partial(lambda inner, loss: inner(loss), call)
    loss_fn: Loss = lambda model, x: call(model(x))  # noqa: E731
    return loss_fn, *sets(config, "scale", 2.0, 1.0), "'scale' of closure variable 'config'"


def cached_function() -> Any:
    config = types.SimpleNamespace(scale=1.0)
    scale = functools.lru_cache(lambda: config.scale)
    loss_fn: Loss = lambda model, x: model(x) * scale()  # noqa: E731
    return loss_fn, *sets(config, "scale", 2.0, 1.0), "'scale' of closure variable 'config'"


def decorator_of_torch() -> Any:
    config = types.SimpleNamespace(scale=1.0)
    plain: Callable[[Tensor], Tensor] = lambda x: x * config.scale  # noqa: E731
    scaled: Callable[[Tensor], Tensor] = torch.no_grad()(plain)
    loss_fn: Loss = lambda model, x: model(scaled(x))  # noqa: E731
    return loss_fn, *sets(config, "scale", 2.0, 1.0), "'scale' of closure variable 'config'"


def default_argument() -> Any:
    def loss_fn(model: Any, x: Tensor, scale: float = 1.0) -> Tensor:
        loss: Tensor = model(x) * scale
        return loss

    return loss_fn, *sets(loss_fn, "__defaults__", (2.0,), (1.0,)), "the default arguments of"


def code_of_a_function() -> Any:
    def weigh(loss: Tensor) -> Tensor:
        return loss

    old, new = weigh.__code__, (lambda loss: loss * 2).__code__
    loss_fn: Loss = lambda model, x: weigh(model(x))  # noqa: E731
    return loss_fn, *sets(weigh, "__code__", new, old), "the code of .*weigh"


def attribute_of_a_function() -> Any:
    def weigh(loss: Tensor) -> Tensor:
        result: Tensor = loss * getattr(weigh, "scale")  # noqa: B009
        return result * weigh.factor  # type: ignore[attr-defined, no-any-return]

    weigh.scale = weigh.factor = 1.0  # type: ignore[attr-defined]
    loss_fn: Loss = lambda model, x: weigh(model(x))  # noqa: E731
    return loss_fn, *sets(weigh, "factor", 2.0, 1.0), "'factor' of closure variable 'weigh'"


def environment_variable() -> Any:
    set_value = environment("SURROUNDING_SCALE", "2.0")
    loss_fn: Loss = lambda model, x: model(x) * float(os.getenv("SURROUNDING_SCALE", "1"))  # noqa: E731
    return (
        loss_fn,
        set_value.__enter__,
        lambda: set_value.__exit__(None, None, None),
        "environment variable 'SURROUNDING_SCALE' was None .* '2.0'",
    )


def imported_inside() -> Any:
    module = types.ModuleType("surrounding_settings")
    module.__file__ = __file__
    module.SCALE = 1.0  # type: ignore[attr-defined]

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        from surrounding_settings import SCALE  # type: ignore[import-not-found]

        loss: Tensor = model(x) * SCALE
        return loss

    sys.modules[module.__name__] = module
    changes = sets(module, "SCALE", 2.0, 1.0)
    return loss_fn, *changes, "'SCALE' of module 'surrounding_settings'"


def context_variable() -> Any:
    scale = contextvars.ContextVar("scale", default=1.0)
    loss_fn: Loss = lambda model, x: model(x) * scale.get()  # noqa: E731
    name = r"the value of closure variable 'scale' .* was 1\.0 .* now 2\.0"
    return loss_fn, lambda: scale.set(2.0), lambda: scale.set(1.0), name


def length_of_a_long_list() -> Any:
    items = [1.0] * 20_000
    loss_fn: Loss = lambda model, x: model(x) * len(items)  # noqa: E731
    return loss_fn, lambda: items.append(1.0), items.pop, "the length of closure variable 'items'"


OBJECT_CASES: tuple[Case, ...] = (
    object_without_dict,
    behind_a_property,
    behind_a_method,
    handed_on,
    made_up_attribute,
    method_of_the_owner,
    deep_chain,
    cached_function,
    decorator_of_torch,
    default_argument,
    code_of_a_function,
    attribute_of_a_function,
    environment_variable,
    imported_inside,
    context_variable,
    length_of_a_long_list,
)
