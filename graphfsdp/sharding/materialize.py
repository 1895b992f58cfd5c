"""`materialize`: memory and values for a model that was built on the meta device.

Note [Unit by unit]: modules are initialised in the order in which constructors run, whatever the
units are. A unit's parameters are whole from its first module to its last one, then the first
rank's values go to all ranks and each keeps its rows. So what is whole at a time is what is whole
in a forward pass of ZeRO-3: the unit that is worked on, and those around it.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.collectives import broadcast_
from graphfsdp.base.dtensors import local_part
from graphfsdp.base.protocols import sharded_roots
from graphfsdp.base.rank_agreement import RankStore
from graphfsdp.base.torch_internals import buffers_of, parameters_of
from graphfsdp.errors import ConfigError, GraphFSDPError
from graphfsdp.sharding.group import ManagedParameter
from graphfsdp.sharding.meta_tensors import is_partly_unset, mark_unset_, move
from graphfsdp.sharding.module import class_name, units_in, units_with
from graphfsdp.sharding.schedule import move_together
from graphfsdp.sharding.unit import Unit


def materialize(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    init: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Give memory and values to everything of a model that is on the meta device.

    Every rank calls it, after ``fully_shard`` and before the first forward pass::

        with torch.device("meta"):
            model = GPT(config)
        for block in model.blocks:
            graphfsdp.fully_shard(block)
        graphfsdp.fully_shard(model)
        graphfsdp.materialize(model)

    Each module that holds something on the meta device is initialised as its constructor would:
    by its ``reset_parameters`` or ``_reset_parameters``, then by the ``_init_weights(module)`` of
    itself or the nearest module around it (Hugging Face's models), in whose place ``init`` comes
    if it is given. The order is that of constructors and of ``nn.Module.apply``. Every rank
    draws; the values of the first one go to all. Never more is whole at a time than one unit and
    those around it. What a constructor sets besides, in a loop over parameters for one, is not
    set here: a warning names what has been written more often than by these methods.

    What is not on the meta device keeps its values and its identity, even where an initialisation
    writes to it; buffers that lie elsewhere are moved to the device. Parameters that were on it
    keep their identity and attributes too, and stay tied.

    Args:
        model: Sharded, in whole or in part, or not at all.
        device: Where to; None is the device of the units' mesh, or torch's default device.
        init: Sets what the module that it is given holds itself, as for ``nn.Module.apply``.

    Returns:
        The model.

    Raises:
        ConfigError: a module has no initialisation, one that takes more than the module, or it
            does not set everything; named.
        GraphFSDPError: an initialisation failed on some rank; all ranks raise. The model can
            still be materialised afterwards.
    """
    if not isinstance(model, nn.Module) or (init is not None and not callable(init)):
        raise ConfigError(
            "materialize takes a torch.nn.Module, and as init a function of a module; got "
            f"{type(model).__name__} and {type(init).__name__}"
        )
    target = _target_device(device, units_in(model))
    materialization = _Materialization(model, init, target)
    with torch.device(target), torch.no_grad():
        materialization.run()
    return model


@contextmanager
def memory_for_values(model: nn.Module) -> Iterator[None]:
    """Give memory to what is on the meta device, for values of all that a state dict holds.

    Buffers that no state dict holds are initialised as by ``materialize`` afterwards, without
    moving the state of a generator. If the body raises, the model awaits all values as before.

    Raises:
        ConfigError: something is left that nothing initialises; what was brought stays.
    """
    units = units_in(model)
    managed = {id(item.param): item for unit in units for item in unit.group.managed}
    plain = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and tensor.is_meta and id(tensor) not in managed
    }
    awaits = any(unit.group.awaits_values for unit in units)
    if not (awaits or plain or any(buffer.is_meta for buffer in model.buffers())):
        yield
        return
    device = _target_device(None, units)
    if awaits:
        for root in sharded_roots(model):
            move_together(units_with(root), device)
    for name, tensor in plain.items():
        if tensor.is_meta:  # not given memory under another name
            move(tensor, device, name)
    try:
        yield
    except BaseException:
        for name, tensor in plain.items():
            if not tensor.is_meta:
                move(tensor, "meta", name)
        raise
    for item in managed.values():
        item.awaited = None
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        materialize(model, device)


@dataclass(frozen=True)
class _Entry:
    """A tensor under one of its names."""

    name: str
    module: nn.Module
    place: dict[str, Any]  # the module's parameters or buffers
    attribute: str
    key: int  # the same for all names of a tensor

    def tensor(self) -> Tensor:
        held: Tensor = self.place[self.attribute]
        return held


@dataclass
class _Stop:
    name: str
    module: nn.Module
    own: Callable[[], object] | None  # its method that sets its values
    of_model: Callable[[], object] | None  # what sets them after that
    entries: list[_Entry]  # what it sets
    opens: list[Unit] = field(default_factory=list)  # units that are made whole before
    closes: list[Unit] = field(default_factory=list)  # units that are sharded again after


def _entries(module_name: str, module: nn.Module) -> Iterator[_Entry]:
    places: tuple[Any, ...] = parameters_of(module), buffers_of(module)
    for place in places:
        for attribute, tensor in place.items():
            if tensor is not None:
                name = f"{module_name}.{attribute}".lstrip(".")
                yield _Entry(name, module, place, attribute, id(tensor))


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
            full_name = f"{name}.{child_name}".lstrip(".")
            yield from _in_init_order(child, full_name, (*around, module), seen)
    yield name, module, around


def _own_initializer(module: nn.Module) -> Callable[[], object] | None:
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next(filter(_takes, found), None)


def _model_initializer(
    module: nn.Module,
    around: Sequence[nn.Module],
    init: Callable[[nn.Module], object] | None,
) -> Callable[[], object] | None:
    """Return what sets a module's values after it is constructed, None if there is nothing."""
    if init is not None:
        return partial(init, module)
    found = (getattr(owner, "_init_weights", None) for owner in (module, *reversed(around)))
    of_model: Any = next(filter(callable, found), None)
    return None if of_model is None else partial(of_model, module)


def _takes(function: Any, *args: object) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


@contextmanager
def _keeping(module: nn.Module, kept: Set[int]) -> Iterator[None]:
    """Put back what the body changes of some tensors, by id, in a module and below."""
    found = [entry for below in module.modules() for entry in _entries("", below)]
    tensors = [(entry, entry.tensor()) for entry in found if entry.key in kept]
    before = [local_part(tensor).detach().clone() for _, tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for (entry, tensor), values in zip(tensors, before, strict=True):
                local_part(tensor).detach().copy_(values)
                entry.place[entry.attribute] = tensor


class _Materialization:
    """What a model awaits: ``stops`` are the modules to initialise, in this order.

    ``plain``: what no unit manages of what they set, by key; ``kept``: tensors with values, by id.
    """

    def __init__(
        self,
        model: nn.Module,
        init: Callable[[nn.Module], object] | None,
        device: torch.device,
    ) -> None:
        self._together = [units_with(root) for root in sharded_roots(model)]
        self._units = units_in(model)
        for unit in self._units:
            unit.refuse_busy("materialised")
        self._device = device
        self._agreement = RankStore(_groups(self._units), "materialize")
        self._plain: dict[int, _Entry] = {}
        self._kept: dict[int, _Entry] = {}
        self._stops = self._find_stops(model, init)
        self._done: set[int] = set()  # keys of the tensors that some module has set
        # By name, the version that a tensor reaches if it is written as often as on the meta
        # device, where a write counts as well; None where the user's own function sets values.
        self._expected: dict[str, int] | None = {} if init is None else None
        self._written_less: list[str] = []
        # Units that are whole, each with its awaited parameters as its modules hold them.
        self._open: dict[Unit, list[tuple[ManagedParameter, Tensor]]] = {}

    def _find_stops(
        self, model: nn.Module, init: Callable[[nn.Module], object] | None
    ) -> list[_Stop]:
        managed = {id(item.param): item for unit in self._units for item in unit.group.managed}
        stops = []
        for name, module, around in _in_init_order(model):
            awaited = []
            for entry in _entries(name, module):
                item = managed.get(entry.key)
                if not (entry.tensor().is_meta if item is None else item.awaited is not None):
                    self._kept.setdefault(entry.key, entry)
                    continue
                awaited.append(entry)
                if item is None:
                    self._plain.setdefault(entry.key, entry)
            if awaited:
                of_model = _model_initializer(module, around, init)
                has_weights = any(isinstance(each.tensor(), nn.Parameter) for each in awaited)
                if not (has_weights or _takes(of_model)):
                    of_model = None
                stops.append(_Stop(name, module, _own_initializer(module), of_model, awaited))
        for unit in self._units:
            keys = {id(item.param) for item in unit.group.managed}
            mine = [stop for stop in stops if any(entry.key in keys for entry in stop.entries)]
            if mine:
                mine[0].opens.append(unit)
                mine[-1].closes.append(unit)
        return stops

    def run(self) -> None:
        names = [entry.name for stop in self._stops for entry in stop.entries]
        self._agreement.refuse_differences("parameters and buffers without values", names)
        try:
            with self._told():
                self._check()
                self._give_memory()
            for stop in self._stops:
                name = f"{stop.name or '(root)'} ({class_name(stop.module)})"
                with self._told(f"the initialisation of {name}"):
                    for unit in stop.opens:
                        self._make_whole(unit)
                    self._initialize(stop)
                for unit in stop.closes:
                    self._shard(unit)
            with self._told():
                self._check_plain()
            self._agreement.go_on(None)
            for entry in self._plain.values():
                _broadcast(entry.tensor(), self._agreement.groups)
        except BaseException:
            self._undo()
            raise
        self._tell_of_other_values()

    def _check(self) -> None:
        for stop in self._stops:
            # Without it the values would be others than a constructor's.
            if isinstance(stop.of_model, partial) and not _takes(stop.of_model):
                raise ConfigError(
                    f"{stop.of_model.func.__qualname__} cannot be called with "
                    f"{stop.name or '(root)'!r} ({class_name(stop.module)}) alone, as materialize "
                    "would. Remedy: let it take one module, whose own weights it sets; or "
                    "materialize(model, init=...), a function that does so"
                )
        able = {
            entry.key
            for stop in self._stops
            if stop.own is not None or stop.of_model is not None
            for entry in stop.entries
        }
        without = [
            f"{entry.name!r} ({class_name(entry.module)})"
            for stop in self._stops
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

    @contextmanager
    def _told(self, what: str = "") -> Iterator[None]:
        """Tell the other ranks of a failure where they agree next, ahead of a collective."""
        try:
            yield
        except Exception as error:  # of whatever kind: all ranks raise
            failure = error
            if what and not isinstance(error, GraphFSDPError):
                failure = GraphFSDPError(f"{what} failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
            self._agreement.go_on(failure)

    def _give_memory(self) -> None:
        for units in self._together:
            move_together(units, self._device)
        for entry in self._plain.values():
            awaited = entry.tensor()._version
            move(entry.tensor(), self._device, entry.name)
            self._expect(entry.name, awaited, entry.tensor())
        for entry in self._kept.values():
            if entry.tensor().device != self._device and entry.place is buffers_of(entry.module):
                move(entry.tensor(), self._device, entry.name)

    def _make_whole(self, unit: Unit) -> None:
        """Put awaited parameters into a unit's modules, whole and marked as not set."""
        self._open[unit] = []
        for item in unit.group.managed:
            if item.awaited is not None:
                dtype = item.awaited.dtype
                whole = torch.empty(item.initial_shape, dtype=dtype, device=self._device)
                mark_unset_(whole)
                self._open[unit].append((item, whole))
                param = nn.Parameter(whole, requires_grad=item.param.requires_grad)
                vars(param).update(vars(item.param))
                self._expect(unit.group.full_name(item), item.awaited._version, param)
                for owner, attribute in item.owners:
                    parameters_of(owner)[attribute] = param

    def _initialize(self, stop: _Stop) -> None:
        earlier = [entry for entry in stop.entries if entry.key in self._done]
        kept = set(self._kept)
        if stop.own is not None and len(earlier) < len(stop.entries):
            # What is tied keeps the values of the module that comes first, as in constructors.
            with _keeping(stop.module, kept | {id(entry.tensor()) for entry in earlier}):
                stop.own()
        if stop.of_model is not None:
            with _keeping(stop.module, kept):
                stop.of_model()
        self._done |= {entry.key for entry in stop.entries}

    def _shard(self, unit: Unit) -> None:
        """Keep this rank's rows; the parameters have values from now on."""
        with self._told():
            self._collect(unit)
        self._agreement.go_on(None)
        for item, whole in self._open[unit]:
            _broadcast(whole, self._equal_groups(unit))
            item.load(whole)
            owner, attribute = item.owners[0]
            vars(item.param).update(vars(parameters_of(owner)[attribute]))
            item.awaited = None
        unit.group.install_shards()
        del self._open[unit]

    def _collect(self, unit: Unit) -> None:
        for item, whole in self._open[unit]:
            owner, attribute = item.owners[0]
            held = parameters_of(owner).get(attribute)
            name = unit.group.full_name(item)
            if held is None or held.shape != whole.shape:
                shape = "nothing" if held is None else f"shape {tuple(held.shape)}"
                raise ConfigError(
                    f"the initialisation of parameter {name!r} put {shape} in the place of shape "
                    f"{tuple(whole.shape)}, which is sharded already. Remedy: fill it in place"
                )
            if held.data_ptr() != whole.data_ptr():
                whole.copy_(held)
            else:
                self._compare_writes(name, held)
            if is_partly_unset(whole):
                raise ConfigError(_unset_message(f"parameter {name!r}", class_name(owner)))

    def _equal_groups(self, unit: Unit) -> list[dist.ProcessGroup]:
        """Return the groups of ranks that get the same values for a unit.

        Ranks that another unit is cut over by tensor parallelism hold this one in duplicate;
        experts are others on each rank of their axis.
        """
        alike = [other for other in self._units if other.group.options.mesh.experts is None]
        if unit not in alike:
            alike = [unit]
        return list(dict.fromkeys(g for other in alike for g in other.group.equal_groups))

    def _check_plain(self) -> None:
        for entry in self._plain.values():
            if is_partly_unset(entry.tensor()):
                raise ConfigError(_unset_message(repr(entry.name), class_name(entry.module)))
            self._compare_writes(entry.name, entry.tensor())

    def _expect(self, name: str, num_writes: int, tensor: Tensor) -> None:
        if self._expected is not None:
            self._expected[name] = tensor._version + num_writes

    def _compare_writes(self, name: str, tensor: Tensor) -> None:
        if self._expected is not None and tensor._version < self._expected[name]:
            self._written_less.append(name)

    def _tell_of_other_values(self) -> None:
        if not self._written_less:
            return
        first, *more = self._written_less
        warnings.warn(
            f"parameter or buffer {first!r}{f' and {len(more)} more' if more else ''} was written "
            "more often when the model was built on the meta device than materialize has written "
            "it now: something but reset_parameters() and _init_weights(module) sets it there, a "
            "loop over parameters in a constructor for one, and its values may be others than "
            "those. Remedy: do so in _init_weights(module) of the model, or in the function given "
            "as materialize(model, init=...)",
            stacklevel=4,  # at materialize
        )

    def _undo(self) -> None:
        """Leave the model so that it can be materialised once more."""
        for unit in self._open:
            unit.group.install_shards()
        for entry in self._plain.values():
            if not entry.tensor().is_meta:
                move(entry.tensor(), "meta", entry.name)


def _broadcast(tensor: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
    """Give all ranks of a grid the values of its first one, in place, as bytes."""
    if not tensor.numel():
        return
    packed = tensor.detach().contiguous()
    for group in groups:  # the second axis spreads what the first has brought
        packed = packed.to(_device_within(group, tensor.device))
        broadcast_(packed.view(-1).view(torch.uint8), group)
    if packed.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(packed)


def _device_within(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return where a group can send what lies on a device: NCCL sends nothing from a CPU."""
    kinds = [each.type for each in group._device_types]  # none of a group written in Python
    return device if not kinds or device.type in kinds else torch.device(kinds[0])


def _target_device(device: torch.device | str | None, units: Sequence[Unit]) -> torch.device:
    if device is None and units:
        device = units[0].group.options.mesh.mesh.device_type
    target = torch.get_default_device() if device is None else torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    if target.type == "meta":
        raise ConfigError(
            "materialize cannot give memory on the meta device. Remedy: device='cpu' or 'cuda'"
        )
    return target


def _groups(units: Sequence[Unit]) -> list[dist.ProcessGroup]:
    """Return the groups of some units, each once; all ranks where there is no unit."""
    found = {group: None for unit in units for group in unit.group.groups}
    if not found and dist.is_available() and dist.is_initialized():
        assert dist.group.WORLD is not None
        found = {dist.group.WORLD: None}
    return list(found)


def _unset_message(what: str, kind: str) -> str:
    return (
        f"{what} has no values, or only some, after the initialisation of its {kind}. Remedy: set "
        f"it in the {kind}'s reset_parameters(), or in the function given as "
        "materialize(model, init=...)"
    )
