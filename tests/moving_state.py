"""Ways in which Python holds a count, and ways in which a loss makes use of one."""

import argparse
import collections
import contextvars
import functools
import math
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


# How a count is held, and what its name must have in it.
HELD: dict[str, tuple[Callable[[], Count], str]] = {
    "attribute": (lambda: of_attribute(argparse.Namespace(calls=0)), "owner.calls"),
    "float": (lambda: of_attribute(argparse.Namespace(calls=0.0), step=0.5), "owner.calls"),
    "decimal": (
        lambda: of_attribute(argparse.Namespace(calls=Decimal(0)), step=Decimal("0.5")),
        "owner.calls",
    ),
    "module": (lambda: of_attribute(CountingNet()), "owner.calls"),
    "tensor": (lambda: of_attribute(counting_tensor()), "owner.calls"),
    "property": (lambda: of_attribute(Hidden()), "owner._calls"),
    "slots": (lambda: of_attribute(Slots()), "owner.calls"),
    "class": (lambda: of_attribute(type("Mine", (OfAClass,), {"calls": 0})), "Mine.calls"),
    "numpy_scalar": (lambda: of_attribute(types.SimpleNamespace(calls=np.int64(0))), "owner.calls"),
    "item": (lambda: of_item(TABLE), "table['calls']"),
    "user_dict": (lambda: of_item(collections.UserDict(calls=0)), "table.data['calls']"),
    "own_dict": (lambda: of_item(Own(calls=0)), "table['calls']"),
    "counter": (lambda: of_item(COUNTS), "table['calls']"),
    "list_item": (lambda: of_item([0], 0), "table[0]"),
    "numpy_array": (lambda: of_item(np.zeros(3, dtype=np.int64), 1), "table"),
    "array": (lambda: of_item(array("q", [0, 0]), 1), "table"),
    "closure": (of_closure, "calls"),
    "global": (of_global, "CALLS"),
    "globals_by_name": (of_globals_by_name, "CALLS"),
    "loaded_module": (of_loaded_module, "moving_settings.calls"),
    "imported_module": (of_imported_module, "moving_settings.calls"),
    "inner_module": (of_inner_module, "moving_settings.inner.calls"),
    "registered_function": (of_registered_function, "table['calls']"),
    "reference": (of_reference, "reference()._calls"),
    "proxy": (lambda: of_attribute(weakref.proxy(kept(Hidden()))), "owner._calls"),
    "thread": (of_this_thread, "owner.calls"),
    "default": (of_default, "(default 0)[0]"),
    "function": (of_function, "counted.calls"),
    "tuple": (lambda: of_replaced((0, "a"), lambda old: (old[0] + 1, "a")), "state.value[0]"),
    "named_tuple": (
        lambda: of_replaced(Pair(0, "a"), lambda old: old._replace(calls=old.calls + 1)),
        "state.value.calls",
    ),
    "nested_tuple": (of_nested_tuple, "table['state'][1][0]"),
    "frozen": (
        lambda: of_replaced(Frozen(), lambda old: Frozen(old.calls + 1)),
        "state.value.calls",
    ),
    "text": (lambda: of_text("call {}"), "state.word"),
    "length_of_a_list": (lambda: of_holder([], lambda items: items.append(0)), "holder"),
    "length_of_a_set": (lambda: of_holder(set(), lambda seen: seen.add(len(seen))), "holder"),
    "queue": (
        lambda: of_holder(queue.Queue(), lambda items: items.put(1), queue.Queue.qsize),
        "holder",
    ),
    "deque": (
        lambda: of_holder(
            collections.deque([0], maxlen=3),
            lambda recent: recent.append(recent[-1] + 1),
            lambda recent: int(recent[-1]),
        ),
        "holder",
    ),
    "bytearray": (lambda: of_holder(bytearray(), lambda content: content.append(1)), "holder"),
    "method": (of_method, "Meter.total"),
    "context_variable": (of_context, "SCALE.get()"),
}


def every(count: int, period: int) -> bool:
    return count % period == 0


def indexed(loss: Tensor, count: int) -> Tensor:
    return loss * WEIGHTS[min(count // 12, 50)]


WEIGHTS = [float(2 if index > 4 else 1) for index in range(51)]

# What a loss does with its count: none of them can be seen while it is recorded.
USES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "decays": lambda loss, count: loss * math.exp(-0.1 * (count // 10)),
    "ramps_up": lambda loss, count: loss * (1 + max(0.0, (count - 8) / 10)),
    "is_late": lambda loss, count: loss * 2 if count > 1_000 else loss,
    "runs_out": lambda loss, count: loss if max(0, 500 - count) else loss * 2,
    "at_once": lambda loss, count: loss * 2 if count == 500 else loss,
    "every_so_many": lambda loss, count: loss * 2 if every(count, 7) else loss,
    "looks_up": indexed,
    "interpolates": lambda loss, count: loss * float(np.interp(count, [0, 40, 80], [1, 1, 2])),
}


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
