"""Ways in which Python code comes by a value around it, and how a change of the value is named.

A table for two promises: a value that has changed between two replays is named, and one that the
iteration itself moves is refused where something follows from it.
"""

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import operator
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import nn

Read = Callable[[], Any]
WEIGHT = "'weight' of"
FACTOR = 1
KEPT: list[Any] = []  # what is referred to weakly


@dataclass
class Way:
    """A value that code reads.

    Attributes:
        read: Returns it, as a number.
        put: Makes it another number; it is 1 at first.
        named: How a change is named.
        count: Makes it one more and returns it, where that is not done by ``put``.
        model: Which is captured, where that is what has the value.
    """

    read: Read
    put: Callable[[int], object]
    named: str = WEIGHT
    count: Read | None = None
    model: nn.Module | None = None

    def counted(self) -> Any:
        """Make it one more, and return it."""
        if self.count is not None:
            return self.count()
        self.put(self.read() + 1)
        return self.read()


def of(owner: Any, read: Read | None = None, named: str = WEIGHT) -> Way:
    """Return the way to an attribute, straight or by something else that leads to it."""
    owner.weight = 1
    return Way(read or (lambda: owner.weight), lambda n: setattr(owner, "weight", n), named)


def by(function: Callable[[Any], Any], owner: Any) -> Way:
    """Return the way of a function that is given the owner."""
    return of(owner, lambda: function(owner), "'weight' of .*'owner'")


def of_item(table: Any, named: str, key: Any = "weight") -> Way:
    return Way(lambda: table[key], lambda n: operator.setitem(table, key, n), named)


def of_dict(make: Callable[[dict[str, int]], Read], named: str) -> Way:
    """Return the way to an item of a dict that something else leads to."""
    table = {"weight": 1}
    return Way(make(table), lambda n: table.update(weight=n), named)


def by_item(held: Any) -> Read:
    return lambda: held["weight"]


def of_replaced(
    make: Callable[[int], Any], read: Callable[[Any], Any], named: str = "'value' of .* 'state'"
) -> Way:
    """Return the way to a value that is replaced, never changed."""
    state = types.SimpleNamespace(value=make(1))
    return Way(lambda: read(state.value), lambda n: setattr(state, "value", make(n)), named)


def of_length(
    items: Any,
    grow: Callable[[Any], object],
    shrink: Callable[[Any], object],
    length: Callable[[Any], int] = len,
    named: str = "closure variable 'items'",
) -> Way:
    def put(n: int) -> None:
        if n != length(items):
            (grow if n > length(items) else shrink)(items)

    def count() -> int:
        grow(items)
        return length(items)

    return Way(lambda: length(items), put, named, count)


# ---------------------------------------------------------------- variables and modules


def of_closure() -> Way:
    factor = 1

    def put(n: int) -> None:
        nonlocal factor
        factor = n

    return Way(lambda: factor, put, "closure variable 'factor' .* was 1 .* now 2")


def of_global() -> Way:
    def put(n: int) -> None:
        global FACTOR
        FACTOR = n

    return Way(lambda: FACTOR, put, "global variable 'FACTOR' .* was 1 .* now 2")


SETTINGS = types.ModuleType("settings_around")
SETTINGS.__file__ = __file__
exec("def scale(): return FACTOR", vars(SETTINGS))


def of_module(read: Read, where: str) -> Way:
    """Return the way to a number of a module that can be imported."""
    sys.modules[SETTINGS.__name__] = SETTINGS
    return Way(read, lambda n: setattr(SETTINGS, "FACTOR", n), f"'FACTOR' of {where}")


def imported() -> Any:
    import settings_around  # type: ignore[import-not-found]

    return settings_around.FACTOR


def held_by_a_module(owner: Any, read: Read, named: str) -> Way:
    SETTINGS.held = owner  # type: ignore[attr-defined]
    return of(owner, read, named)


def of_inner_module() -> Way:
    inner: Any = types.ModuleType("settings_around.inner")
    inner.__file__ = __file__
    return held_by_a_module(inner, lambda: SETTINGS.held.weight, f"{WEIGHT} module 'settings_")


def typed(filename: str) -> Way:
    """Return the way of code that lies in no file."""
    names: dict[str, Any] = {"table": {}}
    exec(compile("def read(): return table['weight']", filename, "exec"), names)
    put = functools.partial(operator.setitem, names["table"], "weight")
    return Way(names["read"], lambda n: put(n), "'weight' of global variable 'table'")


# ---------------------------------------------------------------- classes and methods


@dataclass
class Data:
    weight: int = 1


Frozen = dataclasses.make_dataclass("Frozen", ["weight"], frozen=True)
Pair = collections.namedtuple("Pair", ["weight", "name"])
Mode = enum.IntEnum("Mode", ["ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX"])


class Slots:
    __slots__ = ("weight",)


class Hidden:
    """Tells its weight by a property."""

    _weight = 1

    @property
    def weight(self) -> int:
        return self._weight

    @weight.setter
    def weight(self, value: int) -> None:
        self._weight = value


class Told:
    """Tells its weight without an object of it."""

    weight = 1

    @classmethod
    def by_class(cls) -> int:
        return cls.weight


class Made:
    """Makes its attributes up, as configurations of libraries do."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.__dict__["content"] = content

    def __getattr__(self, name: str) -> Any:
        value = self.content[name]
        return Made(value) if isinstance(value, dict) else value


class Special:
    """Gives its weight by methods that Python calls."""

    weight: int
    epoch = 0

    def __rmul__(self, other: int) -> int:
        return other * self.weight

    def __len__(self) -> int:
        return self.weight

    def __str__(self) -> str:
        return f"{self.weight} in epoch {self.epoch}"


def of_made_up() -> Way:
    content = {"inner": {"weight": 1}}
    config = Made(content)
    put = functools.partial(operator.setitem, content["inner"], "weight")
    named = "'weight' of 'inner' of 'content' of closure variable 'config'"
    return Way(lambda: config.inner.weight, lambda n: put(n), named)


# ---------------------------------------------------------------- functions and references


def of_default() -> Way:
    def read(state: list[int] = [1]) -> int:  # noqa: B006
        return state[0]

    state: list[int] = read.__defaults__[0]  # type: ignore[index]
    return Way(read, lambda n: operator.setitem(state, 0, n), "0 of the default of 'state'")


def of_registered_function() -> Way:
    owner = Data()

    @functools.singledispatch
    def read(value: object) -> int:
        return 0

    @read.register
    def _(value: int) -> int:
        return owner.weight

    return of(owner, lambda: read(1), "'weight' of closure variable 'owner'")


def by_partial() -> Way:
    owner = Data()
    given = functools.partial(lambda thing: thing.weight, owner)
    return of(owner, lambda: given(), "'weight' of argument 0 of a functools.partial")


def by_reference() -> Way:
    KEPT.append(owner := Data())
    reference: Any = weakref.ref(owner)
    put = lambda n: setattr(reference(), "weight", n)  # noqa: E731
    return Way(lambda: reference().weight, put, "'weight' of .*'reference'")


def by_proxy() -> Way:
    KEPT.append(owner := Data())
    return of(weakref.proxy(owner), None, "'weight' of .*'owner'")


def by_nested_tuple(table: dict[str, int]) -> Read:
    tables = {"first": (table,)}
    return lambda: tables["first"][0]["weight"]


# ---------------------------------------------------------------- torch's own


def learning_rate_of_others() -> Way:
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1)
    put = functools.partial(operator.setitem, other.param_groups[0], "lr")
    return Way(lambda: other.param_groups[0]["lr"], lambda n: put(n), "'lr' of group 0 of")


WAYS: dict[str, Callable[[], Way]] = {
    "closure": of_closure,
    "global": of_global,
    "global_by_its_name": lambda: Way(
        lambda: globals()["FACTOR"],
        lambda n: operator.setitem(globals(), "FACTOR", n),
        "global variable 'FACTOR'",
    ),
    "module": lambda: of_module(lambda: SETTINGS.FACTOR, "global variable 'SETTINGS'"),
    "loaded_module": lambda: of_module(
        lambda: sys.modules["settings_around"].FACTOR, "module 'settings_around'"
    ),
    "imported_module": lambda: of_module(imported, "module 'settings_around'"),
    "function_of_a_module": lambda: of_module(lambda: SETTINGS.scale(), "settings_around"),
    "object_of_a_module": lambda: held_by_a_module(
        Data(), lambda: SETTINGS.held.weight, "'weight' of 'held' of global variable 'SETTINGS'"
    ),
    "inner_module": of_inner_module,
    "module_without_a_file": lambda: of(types.ModuleType("made")),
    "typed_at_a_prompt": lambda: typed("<stdin>"),
    "attribute": lambda: of(argparse.Namespace()),
    "attribute_of_a_module": lambda: of(nn.Identity(), None, "attribute 'Identity.weight'"),
    "attribute_of_a_tensor": lambda: of(torch.ones(2)),
    "property": lambda: of(Hidden(), None, "'_weight' of closure variable 'owner'"),
    "slots": lambda: of(Slots()),
    "class": lambda: of(type("Mine", (Told,), {}), None, r"Mine\.weight"),
    "class_method": lambda: of(Told, lambda: Told.by_class(), r"Told\.weight"),
    "made_up": of_made_up,
    "length": lambda: by(len, Special()),
    "vars": lambda: by(lambda owner: owner.__dict__["weight"], Data()),
    "asdict": lambda: by(lambda owner: dataclasses.asdict(owner)["weight"], Data()),
    "thread": lambda: of(threading.local()),
    "reference": by_reference,
    "proxy": by_proxy,
    "partial": by_partial,
    "default": of_default,
    "registered_function": of_registered_function,
    "item": lambda: of_item({}, "'weight' of closure variable 'table'"),
    "user_dict": lambda: of_item(collections.UserDict(), "closure variable 'table'"),
    "dict_of_another_class": lambda: of_item(collections.Counter(), "'weight' of closure variable"),
    "list_item": lambda: of_item([1], "0 of closure variable 'table'", 0),
    "deque_item": lambda: of_item(collections.deque([1, 1]), "1 of closure variable 'table'", 1),
    "array_of_numpy": lambda: of_item(np.ones(3, dtype=np.int64), "the values of closure", 1),
    "chain_of_dicts": lambda: of_dict(
        lambda table: by_item(collections.ChainMap({}, table)), "'weight' of .* 'held'"
    ),
    "nested_tuple": lambda: of_dict(by_nested_tuple, "'weight' of 0 of 'first' of .*'tables'"),
    "float": lambda: of_replaced(float, float),
    "decimal": lambda: of_replaced(Decimal, float),
    "date": lambda: of_replaced(lambda n: datetime.date(2000, 1, n), lambda date: date.day),
    "number_of_numpy": lambda: of_replaced(np.float32, float),
    "enum_member": lambda: of_replaced(Mode, int, "'value' of .*ONE.*TWO"),
    "tuple": lambda: of_replaced(lambda n: (0, (n, "a")), lambda value: value[1][0]),
    "named_tuple": lambda: of_replaced(lambda n: Pair(n, "a"), lambda pair: pair.weight),
    "frozen": lambda: of_replaced(Frozen, lambda frozen: frozen.weight, "'value' of"),
    "text": lambda: of_replaced(lambda n: f"call {n}", lambda text: int(text.split()[-1])),
    "length_of_a_set": lambda: of_length(
        {0}, lambda items: items.add(len(items)), lambda items: items.remove(len(items) - 1)
    ),
    "length_of_a_queue": lambda: of_length(
        queue.Queue(),
        lambda items: items.put(1),
        lambda items: items.get(),
        lambda items: 1 + items.qsize(),
    ),
    "learning_rate_of_others": learning_rate_of_others,
}
