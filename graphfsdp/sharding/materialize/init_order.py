"""What a model awaits: tensors on the meta device, by the module that sets them, in order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from graphfsdp.errors import ConfigError
from graphfsdp.sharding.materialize.initializers import (
    in_init_order,
    model_initializer,
    own_initializer,
    sets_values_of,
)
from graphfsdp.sharding.module import class_name
from graphfsdp.sharding.unit import Unit


@dataclass(frozen=True)
class Entry:
    """A tensor under one of its names.

    Attributes:
        name: Full name.
        module: The module that holds it.
        attribute: Its name there.
        key: The same for all names of a tensor.
    """

    name: str
    module: nn.Module
    attribute: str
    key: int

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer, not a parameter."""
        return self.attribute in self.module._buffers

    def tensor(self) -> Tensor:
        """Return what the module holds now."""
        place = self.module._buffers if self.is_buffer else self.module._parameters
        held = place[self.attribute]
        assert held is not None
        return held


@dataclass
class Stop:
    """A module to initialise.

    Attributes:
        name: Full name.
        module: The module.
        own: Its method that sets its values.
        of_model: What sets them after that.
        entries: What it sets.
        opens: Units that are made whole before.
        closes: Units that are sharded again after.
    """

    name: str
    module: nn.Module
    own: Callable[[], object] | None
    of_model: Callable[[], object] | None
    entries: list[Entry]
    opens: list[Unit] = field(default_factory=list)
    closes: list[Unit] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name or '(root)'} ({class_name(self.module)})"


@dataclass(frozen=True)
class InitOrder:
    """What a model awaits, and what it has.

    Attributes:
        stops: The modules to initialise, in this order.
        plain: What no unit manages of what they set, by key.
        kept: The tensors with values, by id.
    """

    stops: tuple[Stop, ...]
    plain: dict[int, Entry]
    kept: dict[int, Entry]

    @staticmethod
    def of(
        model: nn.Module, units: Sequence[Unit], init: Callable[[nn.Module], object] | None
    ) -> "InitOrder":
        """Find what a model awaits.

        Args:
            model: Whole or sharded.
            units: Its units.
            init: Given by the user; see ``materialize``.
        """
        managed = {id(item.param): item for unit in units for item in unit.group.managed}
        plain: dict[int, Entry] = {}
        kept: dict[int, Entry] = {}
        by_setter: dict[int, list[Entry]] = {}
        order = list(in_init_order(model))
        for name, module, around in order:
            for entry in _entries(name, module):
                item = managed.get(entry.key)
                if entry.tensor().is_meta if item is None else item.awaited is not None:
                    by_setter.setdefault(id(sets_values_of(module, around)), []).append(entry)
                    if item is None:
                        plain.setdefault(entry.key, entry)
                else:
                    kept.setdefault(entry.key, entry)
        stops = [
            Stop(
                name,
                module,
                own_initializer(module),
                model_initializer(module, around, init),
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
        """Return the full names of what is awaited."""
        return [entry.name for stop in self.stops for entry in stop.entries]

    def check(self) -> None:
        """Check that every tensor has a module that can set it.

        Raises:
            ConfigError: some have none; they are named.
        """
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
    for place in (module._parameters, module._buffers):
        for attribute, tensor in place.items():
            if tensor is not None:
                name = f"{module_name}.{attribute}" if module_name else attribute
                yield Entry(name, module, attribute, id(tensor))
