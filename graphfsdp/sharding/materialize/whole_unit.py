"""A unit whose awaited parameters are whole for a while, so that its modules can set them."""

import math

import torch
from torch import Tensor, nn

from graphfsdp.errors import ConfigError
from graphfsdp.sharding.group import ManagedParameter
from graphfsdp.sharding.materialize.meta_tensors import is_partly_unset, mark_unset_
from graphfsdp.sharding.module import class_name
from graphfsdp.sharding.unit import Unit


class WholeUnit:
    """The whole parameters of one unit between ``open`` and ``close``.

    Attributes:
        unit: The unit.
        flats: [sum of elements] one per dtype: the whole parameters, one after the other.
    """

    unit: Unit
    flats: list[Tensor]

    def __init__(self, unit: Unit, owners: set[int]) -> None:
        """Find what to make whole.

        Args:
            unit: Awaits values.
            owners: Ids of the modules whose initialisation will run. What else these hold is
                made whole too, in copies that are dropped.
        """
        self.unit = unit
        self.flats = []
        self._awaited = [item for item in unit.group.managed if item.awaited is not None]
        self._others = [
            item
            for item in unit.group.managed
            if item.awaited is None and any(id(owner) in owners for owner, _ in item.owners)
        ]
        self._views: list[Tensor] = []

    @property
    def needs_values(self) -> bool:
        """Whether other parameters have to be gathered, which all ranks must do together."""
        return bool(self._others)

    def allocate(self, device: torch.device) -> None:
        """Make the awaited parameters whole, marked as not set, and put them into the modules."""
        by_dtype: dict[torch.dtype, list[ManagedParameter]] = {}
        for item in self._awaited:
            assert item.awaited is not None
            by_dtype.setdefault(item.awaited.dtype, []).append(item)
        views: dict[int, Tensor] = {}
        for dtype, items in by_dtype.items():
            numels = [math.prod(item.initial_shape) for item in items]
            flat = torch.empty(sum(numels), dtype=dtype, device=device)
            mark_unset_(flat)
            self.flats.append(flat)
            for item, part in zip(items, flat.split(numels), strict=True):
                views[id(item)] = part.view(item.initial_shape)
        self._views = [views[id(item)] for item in self._awaited]
        for item, view in zip(self._awaited, self._views, strict=True):
            _install(item, view)

    @torch.no_grad()
    def gather_others(self) -> None:
        """Put whole copies of the other parameters into the modules; a collective."""
        for item in self._others:
            _install(item, item.param.full_tensor().clone())  # type: ignore[attr-defined]

    @torch.no_grad()
    def collect(self) -> None:
        """Take what the initialisation has left in the modules.

        Raises:
            ConfigError: it has set a parameter in parts or not at all, or put in another shape.
        """
        for item, view in zip(self._awaited, self._views, strict=True):
            owner, attribute = item.owners[0]
            held = owner._parameters.get(attribute)
            name = self.unit.group.full_name(item)
            if held is None or held.shape != view.shape:
                shape = "nothing" if held is None else f"shape {tuple(held.shape)}"
                raise ConfigError(
                    f"the initialisation of parameter {name!r} put {shape} in the place of "
                    f"shape {tuple(view.shape)}, which is sharded already. Remedy: fill it in place"
                )
            if held.data_ptr() != view.data_ptr():
                view.copy_(held)
            if is_partly_unset(view):
                raise ConfigError(unset_message(f"parameter {name!r}", class_name(owner)))

    @torch.no_grad()
    def store(self) -> None:
        """Keep this rank's rows; the parameters have values from now on."""
        for item, view in zip(self._awaited, self._views, strict=True):
            item.load(view)
            owner, attribute = item.owners[0]
            vars(item.param).update(vars(owner._parameters[attribute]))
            item.awaited = None

    def close(self) -> None:
        """Put the sharded parameters back, and drop the whole ones."""
        for item in (*self._awaited, *self._others):
            for owner, attribute in item.owners:
                owner._parameters[attribute] = item.param
        self._views.clear()
        self.flats.clear()


def unset_message(what: str, kind: str) -> str:
    """Return what to say of a tensor that no initialisation has set."""
    return (
        f"{what} has no values, or only some, after the initialisation of its {kind}. Remedy: set "
        f"it in the {kind}'s reset_parameters(), or in the function given as "
        "materialize(model, init=...)"
    )


def _install(item: ManagedParameter, whole: Tensor) -> None:
    param = nn.Parameter(whole, requires_grad=item.param.requires_grad)
    vars(param).update(vars(item.param))
    for owner, attribute in item.owners:
        owner._parameters[attribute] = param
