"""Values that lie neither in a dict of an object nor in a module, and code that was typed."""

import collections
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from surrounding_cases import (
    Around,
    Term,
    assert_named_until_put_back,
    puts,
    sets,
)


class Told:
    """Tells its weight without an object of it."""

    weight = 1.0

    @classmethod
    def by_class(cls) -> float:
        return cls.weight


def weighed(
    read: Callable[[], Any], changes: tuple[Callable[[], Any], Callable[[], Any]], named: str
) -> Around:
    return Around(lambda model, x: model(x) * read(), *changes, named)


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


class Criterion:
    """Has what its class has, until it gets something of its own."""

    weight = 1.0

    def scale(self) -> float:
        return self.weight

    def loss(self, model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x) * self.scale()
        return loss


def of_its_own(name: str, value: Any) -> Around:
    criterion = Criterion()
    return Around(
        criterion.loss,
        lambda: setattr(criterion, name, value),
        lambda: delattr(criterion, name),
        f"attribute '{name}' of .* was missing",
    )


CASES: dict[str, Callable[[], Around]] = {
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
def test_a_value_that_lies_elsewhere_is_followed(name: str) -> None:
    assert_named_until_put_back(CASES[name])
