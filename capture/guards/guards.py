"""What must not have changed between two replays."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.asks import Ask, Asked, Guard, hold
from graphfsdp._capture.guards.closures import ClosureGuard, Closures
from graphfsdp._capture.guards.hooks import HookGuard, tables_of, tables_of_modules, users_hooks
from graphfsdp._capture.guards.modules import (
    AttributeGuard,
    NamedModules,
    StructureGuard,
    contents,
    join,
)
from graphfsdp._capture.guards.optimizer import OptimizerGuard
from graphfsdp._capture.guards.settings import SettingsGuard, UnitSettingsGuard, settings_of
from graphfsdp._capture.guards.tensors import TensorGuard
from graphfsdp._capture.trace.attribute_log import AttributeLog
from graphfsdp._capture.trace.source import definition_of
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.sharded import units_of
from graphfsdp.base.torch_internals import buffers_of, parameters_of


class Guards:
    """All that a replay takes for granted, compared before each.

    A replay goes on with the memory, the modules, the numbers and the switches that it was
    recorded with, without an error. So each difference has to be found before it runs.

    Not seen is what lies further around functions than ``closures.py`` says.
    """

    def __init__(
        self,
        model: nn.Module,
        named_params: Mapping[str, nn.Parameter],
        named_gradients: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        counts: Callable[[str], bool],
        functions: Sequence[Callable[..., Any]],
        device: torch.device,
    ) -> None:
        """Prepare; ``arm`` comes when the iteration has been recorded.

        Args:
            model: The model.
            named_params: Trainable parameters by full name.
            named_gradients: Returns their persistent gradients.
            optimizers: Those that step inside the graph.
            counts: Tells whether replays go on with a number that their state has under a key.
            functions: The loss function, or the user's iteration.
            device: Where everything lies.
        """
        self._model = model
        self._named_params = named_params
        self._named_gradients = named_gradients
        self._optimizers = optimizers
        self._counts = counts
        self._device = device
        self._log = AttributeLog()
        functions = [*functions, *users_hooks(model, named_params, optimizers)]
        self._closures = Closures(functions, model)
        self._values: dict[str, object] = {}  # around functions, before the recording
        self._before: dict[int, tuple[Any, Any]] = {}  # containers of modules, with copies
        self._units = units_of(model)
        self._unit_settings: list[Any] = []  # before the recording
        # Of modules and tensors that the iteration reads beside the model: a frozen teacher, a
        # criterion with class weights.
        self._outside: tuple[Guard, ...] = ()
        self._asks: dict[Guard, list[Ask]] = {}
        self._asked = Asked(())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Enter while the iteration is recorded."""
        self._before = contents(self._model)
        self._unit_settings = settings_of(self._units)
        self._values = self._closures.values()
        own = set(map(id, self._model.modules()))
        kinds: set[type[nn.Module]] = set()

        def meet(module: nn.Module) -> None:
            if id(module) in own or "_modules" not in vars(module):  # it is being made
                return
            self._before |= contents(module)
            if type(module) not in kinds and definition_of(module) is not None:
                kinds.add(type(module))
                # What was there before is older than what is there now.
                self._values = self._closures.values([module]) | self._values

        with self._log.noting(meet):
            yield

    def arm(self, was_read: Callable[[Tensor], bool]) -> None:
        """Remember everything as it is now.

        Args:
            was_read: Tells whether the recording has touched a tensor's storage.
        """
        self._log.stop()
        modules = list(self._model.named_modules())
        attributes = AttributeGuard(modules, self._log, was_read, self._before)
        outside = _modules_outside(self._model, self._log)
        find = partial(self._closures.find, [module for _, module in outside])
        closures = ClosureGuard(find, self._values, self._log, was_read)
        beside = AttributeGuard(outside, self._log, was_read, self._before, every_mode=False)
        weights = [each for each in _weights(outside) if was_read(each[1])]
        self._outside = (
            StructureGuard(outside),
            beside,
            HookGuard(list(tables_of_modules(outside))),
            TensorGuard(
                [*weights, *beside.places.named_tensors(), *closures.places.named_tensors()]
            ),
        )
        self._values, self._before = {}, {}
        names = {id(param): name for name, param in self._named_params.items()}
        guards: tuple[Guard, ...] = (
            StructureGuard(modules),
            TensorGuard([*self._named_tensors(), *attributes.places.named_tensors()]),
            TensorGuard(
                ((f"gradient of {name!r}", view) for name, view in self._named_gradients()),
                addresses_only=True,
            ),
            attributes,
            HookGuard(list(tables_of(self._model, self._named_params, self._optimizers))),
            *self._outside,
            closures,
            SettingsGuard(self._device.type),
            UnitSettingsGuard(self._units, self._unit_settings),
            *(OptimizerGuard(each, names, self._counts) for each in self._optimizers),
        )
        self._ask(guards)

    def changes(self) -> list[Change]:
        """Return what has changed since ``arm``; fast where nothing has.

        Capture: never inside one; no host sync.
        """
        if self._asked.hold():
            return []
        doubted = [guard for guard, asks in self._asks.items() if not hold(asks)]
        found = [
            _beside(change) if guard in self._outside else change
            for guard in doubted
            for change in guard.changes()
        ]
        if not found:
            self._ask(doubted)
        return list(dict.fromkeys(found))

    def close(self) -> None:
        """Let go of everything."""
        self._asks, self._asked, self._outside = {}, Asked(()), ()

    def _ask(self, guards: Iterable[Guard]) -> None:
        self._asks |= {guard: list(guard.asks()) for guard in guards}
        self._asked = Asked(ask for asks in self._asks.values() for ask in asks)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"parameter {name!r}", p) for name, p in self._named_params.items())
        yield from ((f"parameter {name!r}", p) for name, p in self._model.named_parameters())
        yield from ((f"buffer {name!r}", b) for name, b in self._model.named_buffers())


def _beside(change: Change) -> Change:
    # It has no part in what the model's own modules decide: which gradients there are, and in which
    # mode an evaluation runs.
    return replace(change, kind=ChangeKind.ATTRIBUTE, name=f"{change.name} outside of the model")


def _modules_outside(model: nn.Module, log: AttributeLog) -> NamedModules:
    """Return those that the log has seen reads of, named by the class of the outermost one."""
    inside = set(map(id, model.modules()))
    read = {id(module): module for module in log.modules() if id(module) not in inside}
    below = {id(child) for module in read.values() for child in module.children()}
    roots = [module for key, module in read.items() if key not in below]
    found: dict[int, tuple[str, nn.Module]] = {}
    for root in roots or read.values():
        for path, module in root.named_modules():
            if id(module) in read:
                found.setdefault(id(module), (f"{type(root).__name__}.{path}".rstrip("."), module))
    return list(found.values())


def _weights(around: NamedModules) -> Iterator[tuple[str, Tensor]]:
    for path, module in around:
        for kind, table in (("parameter", parameters_of(module)), ("buffer", buffers_of(module))):
            for name, tensor in table.items():
                if tensor is not None:
                    yield f"{kind} {join(path, name)!r}", tensor
