"""Whatever way code goes to a value, by operators too, a later change of the value is named."""

import argparse
import dataclasses
import datetime
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable
from decimal import Decimal
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

from footgun_net import inputs, start
from graphfsdp import Phase
from surrounding_cases import CPU, Around, Settings, assert_named_until_put_back

Reads = Callable[[], Any]
Sets = Callable[[float], Any]


class Meta(type):
    weight = 1.0


class OfMeta(metaclass=Meta):
    pass


class Inner:
    """Has what a class of somebody's can have, each with a weight of its own."""

    held = types.SimpleNamespace(weight=1.0)
    by_dispatch = types.SimpleNamespace(weight=1.0)
    scaled: ClassVar[Any]

    def scale(self, factor: float) -> float:
        return float(self.held.weight * factor)

    scaled = functools.partialmethod(scale, 1.0)

    @functools.singledispatchmethod
    def dispatched(self, value: Any) -> float:
        return float(self.by_dispatch.weight)


class Descriptor:
    def __init__(self) -> None:
        self.weight = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.weight


class WithDescriptor:
    weight = Descriptor()


class Special:
    """Gives its weight by methods that Python calls."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.unread = self.epoch = 0

    def __rmul__(self, other: float) -> float:
        return other * self.weight

    def __len__(self) -> int:
        return int(self.weight)

    def __str__(self) -> str:
        return f"{self.weight} in epoch {self.epoch}"


class Missing(dict[str, float]):
    box: ClassVar[dict[str, float]] = {"weight": 1.0}

    def __missing__(self, key: str) -> float:
        return self.box[key]


def by_match(data: Settings) -> tuple[Reads, Sets]:
    def read() -> float:
        match data:
            case Settings(weight=weight):
                return weight
        return 0.0

    return read, lambda value: setattr(data, "weight", value)


def of_object(read: Callable[[Any], Any], thing: Any) -> tuple[Reads, Sets]:
    return lambda: read(thing), lambda value: setattr(thing, "weight", value)


def of_special(read: Callable[[Special], Any]) -> tuple[Reads, Sets]:
    return of_object(read, Special())


def of_dict(make: Callable[[dict[str, float]], Reads]) -> tuple[Reads, Sets]:
    table = {"weight": 1.0}
    return make(table), lambda value: table.update(weight=value)


def by_text(make: Callable[[Any], Reads]) -> tuple[Reads, Sets]:
    data = Settings()
    return make(data), lambda value: setattr(data, "weight", value)


def namespace() -> types.SimpleNamespace:
    return types.SimpleNamespace(weight=1.0)


def by_tuple(thing: Any) -> tuple[Reads, Sets]:
    things = (thing,)
    return lambda: things[0].weight, lambda value: setattr(thing, "weight", value)


def by_nested_tuple(table: dict[str, float]) -> Reads:
    tables = {"first": (table,)}
    return lambda: tables["first"][0]["weight"]


def by_bound_builtin(table: dict[str, float]) -> Reads:
    get = table.get
    return lambda: get("weight")


def by_partial(thing: Any) -> tuple[Reads, Sets]:
    given = functools.partial(lambda thing: thing.weight, thing)
    return lambda: given(), lambda value: setattr(thing, "weight", value)


def of_value(make: Callable[[float], Any], read: Callable[[Any], Any]) -> tuple[Reads, Sets]:
    """Of a value that is replaced, never changed."""
    held = types.SimpleNamespace(value=make(1.0))
    return lambda: read(held.value), lambda value: setattr(held, "value", make(value))


def by_reference(data: Settings) -> tuple[Reads, Sets]:
    reference = weakref.ref(data)

    def read() -> float:
        found = reference()
        assert found is not None
        return found.weight

    return read, lambda value: setattr(DATA, "weight", value)


DATA = Settings()
SETTINGS = types.ModuleType("settings_around")
exec("def scale(): return FACTOR", vars(SETTINGS))


def of_module(name: str, thing: Any, read: Reads) -> tuple[Reads, Sets]:
    setattr(SETTINGS, name, thing)
    return read, lambda value: setattr(thing, "weight", value)


def of_module_table() -> tuple[Reads, Sets]:
    table = SETTINGS.TABLE = {"weight": 1.0}  # type: ignore[attr-defined]
    return lambda: SETTINGS.TABLE["weight"], lambda value: table.update(weight=value)


def of_module_function() -> tuple[Reads, Sets]:
    SETTINGS.FACTOR = 1.0  # type: ignore[attr-defined]
    return lambda: SETTINGS.scale(), lambda value: setattr(SETTINGS, "FACTOR", value)


def of_imported_function() -> tuple[Reads, Sets]:
    SETTINGS.FACTOR = 1.0  # type: ignore[attr-defined]
    sys.modules[SETTINGS.__name__] = SETTINGS

    def read() -> Any:
        from settings_around import scale  # type: ignore[import-not-found]

        return scale()

    return read, lambda value: setattr(SETTINGS, "FACTOR", value)


def by_getter(data: Any, get: Any) -> Reads:
    return lambda: get(data)


WAYS: dict[str, Callable[[], tuple[Reads, Sets]]] = {
    "product": lambda: of_special(lambda special: 1.0 * special),
    "length": lambda: of_special(len),
    "missing_key": lambda: (
        lambda missing=Missing(): missing["weight"],  # noqa: B008
        lambda value: Missing.box.update(weight=value),
    ),
    "match": lambda: by_match(Settings()),
    "attrgetter": lambda: by_text(lambda data: by_getter(data, operator.attrgetter("weight"))),
    "dict": lambda: by_text(lambda data: lambda: data.__dict__["weight"]),
    "asdict": lambda: by_text(lambda data: lambda: dataclasses.asdict(data)["weight"]),
    "tuple": lambda: by_tuple(namespace()),
    "nested_tuple": lambda: of_dict(by_nested_tuple),
    "bound_builtin": lambda: of_dict(by_bound_builtin),
    "partial": lambda: by_partial(namespace()),
    "decimal": lambda: of_value(Decimal, float),
    "date": lambda: of_value(lambda day: datetime.date(2000, 1, int(day)), lambda date: date.day),
    "reference": lambda: by_reference(DATA),
    "table_of_a_module": of_module_table,
    "object_of_a_module": lambda: of_module("data", namespace(), lambda: SETTINGS.data.weight),
    "class_of_a_module": lambda: of_module(
        "Kind", type("Kind", (), {"weight": 1.0}), lambda: SETTINGS.Kind.weight
    ),
    "function_of_a_module": of_module_function,
    "imported_function": of_imported_function,
    "partialmethod": lambda: (
        lambda inner=Inner(): inner.scaled(),  # noqa: B008
        lambda value: setattr(Inner.held, "weight", value),
    ),
    "singledispatchmethod": lambda: (
        lambda inner=Inner(): inner.dispatched(1),  # noqa: B008
        lambda value: setattr(Inner.by_dispatch, "weight", value),
    ),
    "metaclass": lambda: (lambda: OfMeta.weight, lambda value: setattr(Meta, "weight", value)),
    "descriptor": lambda: (
        lambda holder=WithDescriptor(): holder.weight,  # noqa: B008
        lambda value: setattr(vars(WithDescriptor)["weight"], "weight", value),
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_value_is_guarded_whatever_way_code_goes_to_it(name: str) -> None:
    read, put = WAYS[name]()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x) * read()
        return loss

    assert_named_until_put_back(
        lambda: Around(loss_fn, lambda: put(2.0), lambda: put(1.0), "weight|items|of")
    )


@pytest.mark.parametrize("thing", [Special(), Settings(), argparse.Namespace(weight=1.0)])
def test_what_nothing_reads_of_an_object_may_change(thing: Any) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x) * thing.weight
        return loss

    step, *_ = start(CPU, loss_fn)
    for epoch in range(6):
        thing.unread = thing.epoch = epoch
        step(inputs(CPU))
    assert step.phase is Phase.REPLAY
