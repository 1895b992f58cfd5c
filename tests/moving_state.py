"""Ways in which Python holds a count, and a loss that makes use of one."""

import argparse
import collections
import contextvars
import functools
import queue
import sys
import threading
import types
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import CountingNet
from faults import World
from graphfsdp import CaptureError
from graphfsdp.optim import FusedAdam

Count = Callable[[], int]  # counts one more, and returns the count

CALLS = 0
TABLE = {"calls": 0}
COUNTS: collections.Counter[str] = collections.Counter()
MODULE = types.ModuleType("moving_settings")
MODULE.__file__ = __file__
MODULE.calls = 0  # type: ignore[attr-defined]
MODULE.inner = types.ModuleType("moving_settings.inner")  # type: ignore[attr-defined]
MODULE.inner.__file__ = __file__
MODULE.inner.calls = 0
KEPT: list[Any] = []  # what is referred to weakly
SCALE = contextvars.ContextVar("SCALE", default=0)


class Pair(NamedTuple):
    """Is replaced, never changed."""

    calls: int
    name: str


@dataclass(frozen=True)
class Frozen:
    calls: int = 0


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Hidden:
    """Tells its count by a property."""

    def __init__(self) -> None:
        self._calls = 0

    @property
    def calls(self) -> int:
        return self._calls

    @calls.setter
    def calls(self, value: int) -> None:
        self._calls = value


def counting_tensor() -> Tensor:
    tensor = torch.ones(2)
    tensor.calls = 0  # type: ignore[attr-defined]
    return tensor


class OfAClass:
    calls = 0


class Own(dict[str, int]):
    """A dict of somebody's own."""


def of_attribute(owner: Any, name: str = "calls", step: Any = 1) -> Count:
    def counted() -> int:
        setattr(owner, name, getattr(owner, name) + step)
        count: int = round(getattr(owner, name) / step)
        return count

    return counted


def of_item(table: Any, key: Any = "calls") -> Count:
    def counted() -> int:
        table[key] += 1
        return int(table[key])

    return counted


def of_holder(
    holder: Any, grow: Callable[[Any], object], length: Callable[[Any], int] = len
) -> Count:
    def counted() -> int:
        grow(holder)
        return length(holder)

    return counted


def of_closure() -> Count:
    calls = 0

    def counted() -> int:
        nonlocal calls
        calls += 1
        return calls

    return counted


def of_global() -> Count:
    def counted() -> int:
        global CALLS
        CALLS += 1
        return CALLS

    return counted


def of_globals_by_name() -> Count:
    def counted() -> int:
        globals()["CALLS"] += 1
        return int(globals()["CALLS"])

    return counted


def of_loaded_module() -> Count:
    sys.modules["moving_settings"] = MODULE

    def counted() -> int:
        sys.modules["moving_settings"].calls += 1  # type: ignore[attr-defined]
        return int(sys.modules["moving_settings"].calls)

    return counted


def of_imported_module() -> Count:
    sys.modules["moving_settings"] = MODULE

    def counted() -> int:
        import moving_settings  # type: ignore[import-not-found]

        moving_settings.calls += 1
        return int(moving_settings.calls)

    return counted


def of_inner_module() -> Count:
    def counted() -> int:
        MODULE.inner.calls += 1
        return int(MODULE.inner.calls)

    return counted


def of_registered_function() -> Count:
    @functools.singledispatch
    def counted(value: object) -> int:
        return 0

    table = {"calls": 0}

    @counted.register
    def _(value: int) -> int:
        table["calls"] += 1
        return table["calls"]

    return lambda: counted(1)


def kept(thing: Any) -> Any:
    KEPT.append(thing)
    return thing


def of_reference() -> Count:
    reference = weakref.ref(kept(Hidden()))

    def counted() -> int:
        owner: Any = reference()
        owner.calls += 1
        return int(owner.calls)

    return counted


def of_this_thread() -> Count:
    owner = threading.local()
    owner.calls = 0
    return of_attribute(owner)


def of_default() -> Count:
    def counted(state: list[int] = [0]) -> int:  # noqa: B006
        state[0] += 1
        return state[0]

    return counted


def of_function() -> Count:
    def counted() -> int:
        counted.calls += 1  # type: ignore[attr-defined]
        return int(counted.calls)  # type: ignore[attr-defined]

    counted.calls = 0  # type: ignore[attr-defined]
    return counted


def of_replaced(first: Any, following: Callable[[Any], Any]) -> Count:
    state = types.SimpleNamespace(value=first)

    def counted() -> int:
        state.value = following(state.value)
        return int(getattr(state.value, "calls", 0) or state.value[0])

    return counted


def of_nested_tuple() -> Count:
    table = {"state": (0, (0, "a"))}

    def counted() -> int:
        table["state"] = (0, (table["state"][1][0] + 1, "a"))
        return table["state"][1][0]

    return counted


def of_text(template: str) -> Count:
    state = types.SimpleNamespace(word=template.format(0))

    def counted() -> int:
        calls = int(state.word.split()[-1]) + 1
        state.word = template.format(calls)
        return calls

    return counted


def of_method() -> Count:
    class Meter:
        def __init__(self) -> None:
            self.total = 0

        def update(self) -> int:
            self.total += 1
            return self.total

    return Meter().update


def of_context() -> Count:
    def counted() -> int:
        SCALE.set(SCALE.get() + 1)
        return SCALE.get()

    return counted


# How a count is held.
HELD: dict[str, Callable[[], Count]] = {
    "attribute": lambda: of_attribute(argparse.Namespace(calls=0)),
    "float": lambda: of_attribute(argparse.Namespace(calls=0.0), step=0.5),
    "decimal": lambda: of_attribute(argparse.Namespace(calls=Decimal(0)), step=Decimal("0.5")),
    "module": lambda: of_attribute(CountingNet()),
    "tensor": lambda: of_attribute(counting_tensor()),
    "property": lambda: of_attribute(Hidden()),
    "slots": lambda: of_attribute(Slots()),
    "class": lambda: of_attribute(type("Mine", (OfAClass,), {"calls": 0})),
    "numpy_scalar": lambda: of_attribute(types.SimpleNamespace(calls=np.int64(0))),
    "item": lambda: of_item(TABLE),
    "user_dict": lambda: of_item(collections.UserDict(calls=0)),
    "own_dict": lambda: of_item(Own(calls=0)),
    "counter": lambda: of_item(COUNTS),
    "list_item": lambda: of_item([0], 0),
    "numpy_array": lambda: of_item(np.zeros(3, dtype=np.int64), 1),
    "array": lambda: of_item(array("q", [0, 0]), 1),
    "closure": of_closure,
    "global": of_global,
    "globals_by_name": of_globals_by_name,
    "loaded_module": of_loaded_module,
    "imported_module": of_imported_module,
    "inner_module": of_inner_module,
    "registered_function": of_registered_function,
    "reference": of_reference,
    "proxy": lambda: of_attribute(weakref.proxy(kept(Hidden()))),
    "thread": of_this_thread,
    "default": of_default,
    "function": of_function,
    "tuple": lambda: of_replaced((0, "a"), lambda old: (old[0] + 1, "a")),
    "named_tuple": lambda: of_replaced(Pair(0, "a"), lambda old: old._replace(calls=old.calls + 1)),
    "nested_tuple": of_nested_tuple,
    "frozen": lambda: of_replaced(Frozen(), lambda old: Frozen(old.calls + 1)),
    "text": lambda: of_text("call {}"),
    "length_of_a_list": lambda: of_holder([], lambda items: items.append(0)),
    "length_of_a_set": lambda: of_holder(set(), lambda seen: seen.add(len(seen))),
    "queue": lambda: of_holder(queue.Queue(), lambda items: items.put(1), queue.Queue.qsize),
    "deque": lambda: of_holder(
        collections.deque([0], maxlen=3),
        lambda recent: recent.append(recent[-1] + 1),
        lambda recent: int(recent[-1]),
    ),
    "bytearray": lambda: of_holder(bytearray(), lambda content: content.append(1)),
    "method": of_method,
    "context_variable": of_context,
}


def is_late(loss: Tensor, count: int) -> Tensor:
    return loss * 2 if count > 1_000 else loss


def loss_with(count: Count, use: Callable[[Tensor, int], Tensor] | None) -> Callable[..., Tensor]:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        calls = count()
        return loss if use is None else use(loss, calls)

    return loss_fn


def refusal_of(loss_fn: Any, model: nn.Module | None = None) -> CaptureError:
    """Train until the capture refuses, and see that nothing has come of that call."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4) if model is None else model
    optim = FusedAdam(model.parameters(), lr=0.01)
    with graphfsdp.capture(model, optim, loss_fn=loss_fn) as step:
        for _ in range(3):
            step(torch.ones(3, 4))
        for _ in range(2):  # what reaches an operator at once may have settled one call later
            world = World(model, optim)
            try:
                step(torch.ones(3, 4))
            except CaptureError as error:
                world.assert_unchanged("refused")
                return error
    pytest.fail("not refused")
