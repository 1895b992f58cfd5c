"""What a model awaits, in order, and how its values are set so that nothing else changes."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import local_part
from graphfsdp.base.torch_internals import buffers_of, parameters_of
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.module import class_name
from graphfsdp.sharding.unit import Unit

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Entry:
    """A tensor under one of its names."""

    name: str
    module: nn.Module
    attribute: str
    key: int  # the same for all names of a tensor

    @property
    def is_buffer(self) -> bool:
        return self.attribute in buffers_of(self.module)

    def tensor(self) -> Tensor:
        place = buffers_of(self.module) if self.is_buffer else parameters_of(self.module)
        held = place[self.attribute]
        assert held is not None
        return held


@dataclass
class Stop:
    name: str
    module: nn.Module
    own: Callable[[], object] | None  # its method that sets its values
    of_model: Callable[[], object] | None  # what sets them after that
    entries: list[Entry]  # what it sets
    opens: list[Unit] = field(default_factory=list)  # units that are made whole before
    closes: list[Unit] = field(default_factory=list)  # units that are sharded again after

    def __str__(self) -> str:
        return f"{self.name or '(root)'} ({class_name(self.module)})"


@dataclass(frozen=True)
class InitOrder:
    """What a model awaits: ``stops`` are the modules to initialise, in this order.

    ``plain``: what no unit manages of what they set, by key; ``kept``: tensors with values, by id.
    """

    stops: tuple[Stop, ...]
    plain: dict[int, Entry]
    kept: dict[int, Entry]

    @staticmethod
    def of(
        model: nn.Module, units: Sequence[Unit], init: Callable[[nn.Module], object] | None
    ) -> "InitOrder":
        managed = {id(item.param): item for unit in units for item in unit.group.managed}
        plain: dict[int, Entry] = {}
        kept: dict[int, Entry] = {}
        by_setter: dict[int, list[Entry]] = {}
        order = list(_in_init_order(model))
        for name, module, around in order:
            for entry in _entries(name, module):
                item = managed.get(entry.key)
                if entry.tensor().is_meta if item is None else item.awaited is not None:
                    by_setter.setdefault(id(_sets_values_of(module, around)), []).append(entry)
                    if item is None:
                        plain.setdefault(entry.key, entry)
                else:
                    kept.setdefault(entry.key, entry)
        stops = [
            Stop(
                name,
                module,
                _own_initializer(module),
                _model_initializer(module, around, init),
                by_setter[id(module)],
            )
            for name, module, around in order
            if id(module) in by_setter
        ]
        for unit in units:
            keys = {id(item.param) for item in unit.group.managed}
            mine = [stop for stop in stops if any(entry.key in keys for entry in stop.entries)]
            if mine:
                mine[0].opens.append(unit)
                mine[-1].closes.append(unit)
        return InitOrder(tuple(stops), plain, kept)

    def names(self) -> list[str]:
        return [entry.name for stop in self.stops for entry in stop.entries]

    def check(self) -> None:
        able = {
            entry.key
            for stop in self.stops
            if stop.own is not None or stop.of_model is not None
            for entry in stop.entries
        }
        without = [
            f"{entry.name!r} ({class_name(entry.module)})"
            for stop in self.stops
            for entry in stop.entries
            if entry.key not in able
        ]
        if without:
            raise ConfigError(
                f"nothing initialises {', '.join(without)}, on the meta device: its module has no "
                "reset_parameters(), and none around it an _init_weights(module). Remedy: "
                "materialize(model, init=...) with a function that sets what the module that it "
                "is given holds, or build these tensors on a real device"
            )


def _entries(module_name: str, module: nn.Module) -> Iterator[Entry]:
    for place in (parameters_of(module), buffers_of(module)):
        for attribute, tensor in place.items():
            if tensor is not None:
                name = f"{module_name}.{attribute}" if module_name else attribute
                yield Entry(name, module, attribute, id(tensor))


def _in_init_order(
    module: nn.Module,
    name: str = "",
    around: tuple[nn.Module, ...] = (),
    seen: set[int] | None = None,
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Yield full name, module, and the modules around it from the root on; children first.

    So constructors run, and ``nn.Module.apply``: random numbers are drawn in the same order.
    """
    seen = set() if seen is None else seen
    seen.add(id(module))
    for child_name, child in module.named_children():
        if id(child) not in seen:
            full_name = f"{name}.{child_name}" if name else child_name
            yield from _in_init_order(child, full_name, (*around, module), seen)
    yield name, module, around


def _sets_values_of(module: nn.Module, around: Sequence[nn.Module]) -> nn.Module:
    """Return the module whose initialisation sets what a module holds: lists have none."""
    if isinstance(module, _CONTAINERS) and around:
        return _sets_values_of(around[-1], around[:-1])
    return module


def _own_initializer(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        own = getattr(module, name, None)
        if _takes(own):
            return cast("Callable[[], object]", own)
    return None


def _model_initializer(
    module: nn.Module,
    around: Sequence[nn.Module],
    init: Callable[[nn.Module], object] | None,
) -> Callable[[], object] | None:
    """Return what sets a module's values after it is constructed, None if there is nothing."""
    if init is not None:
        return functools.partial(init, module)
    for owner in (module, *reversed(around)):
        of_model: Any = getattr(owner, "_init_weights", None)
        if _takes(of_model, module):
            return functools.partial(of_model, module)
    return None


def _takes(function: Any, *args: object) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


@contextmanager
def keeping(module: nn.Module, kept: Set[int]) -> Iterator[None]:
    """Put back what the body changes of some tensors, by id, in a module and below."""
    before: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (place, name, tensor, local_part(tensor).detach().clone())
        for below in module.modules()
        for place in (cast("dict[str, Any]", parameters_of(below)), buffers_of(below))
        for name, tensor in place.items()
        if tensor is not None and id(tensor) in kept
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for place, name, tensor, values in before:
                local_part(tensor).detach().copy_(values)
                place[name] = tensor
