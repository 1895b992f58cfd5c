"""What must not have changed between two replays."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.modules import (
    hook_places,
    modes,
    structure,
    tables_of,
    tables_of_modules,
    tensor_places,
    users_hooks,
    weights_of,
)
from graphfsdp._capture.guards.moves import Before, Kept, Move, ReadPlaces
from graphfsdp._capture.guards.names import ReadNames
from graphfsdp._capture.guards.optimizer import optimizer_places
from graphfsdp._capture.guards.places import Asked, Places, hold
from graphfsdp._capture.guards.settings import settings_of, switches, unit_settings
from graphfsdp._capture.guards.uses import refuse_deciding
from graphfsdp._capture.guards.walk import Walk
from graphfsdp._capture.trace.ran import Ran
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.sharded import units_of
from graphfsdp.errors import Refuse, raised


class Guards:
    """All that a replay takes for granted, compared before each.

    A replay goes on with the memory, the modules, the numbers and the switches that it was
    recorded with, without an error. So each difference has to be found before it runs.

    Attributes:
        moves: What the recorded iteration has moved in Python and decides nothing, once it is
            armed.
        kept: What it has left in Python, once it is armed.
    """

    def __init__(
        self,
        model: nn.Module,
        named_params: Mapping[str, nn.Parameter],
        named_gradients: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        functions: Sequence[Callable[..., Any]],
        device: torch.device,
        ran: Ran,
    ) -> None:
        """Prepare; ``arm`` comes when the iteration has been recorded.

        Args:
            named_params: Those that are trained.
            named_gradients: Returns those of their persistent gradients that the user sees.
            optimizers: Those that step inside the graph.
            functions: The loss function, or the user's iteration.
            ran: The code of a warm-up, to which that of the recording is added.
        """
        self._model = model
        self._named_params = named_params
        self._named_gradients = named_gradients
        self._optimizers = optimizers
        self._device = device
        hooks = users_hooks(tables_of(model, named_params, optimizers))
        self._functions = [*functions, *hooks]
        self._ran = ran
        self._names = ReadNames(ran)
        self._began: Before | None = None
        self.moves: Sequence[Move] = ()
        self.kept: list[Kept] = []
        self._units = units_of(model)
        self._unit_settings: list[Any] = []  # before the recording
        self._kinds: list[Places | ReadPlaces] = []
        self._read: ReadPlaces | None = None
        self._asked = Asked(())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Enter while the iteration is recorded."""
        self._unit_settings = settings_of(self._units)
        self._began = Before(self._walk())  # the walk holds tensors that the iteration may let go
        yield

    def arm(self, was_read: Callable[[Tensor], bool], refuse: Refuse = raised) -> None:
        """Remember everything as it is now; refuse what decides and the recording has moved.

        Args:
            was_read: Tells whether the recording has touched a tensor's storage.
            refuse: Raises what it is given, or notes it.
        """
        before = self._began
        assert before is not None
        found = self._walk()
        self.kept = before.left(found)
        self.moves = refuse_deciding(before.moves_to(found), self._ran, found.places, refuse)
        # No method of this: what a dropped step holds is to be freed without the collector.
        take = partial(Walk, self._names, self._model, self._functions)
        self._read = ReadPlaces(take, found, before, was_read)
        modules = list(self._model.named_modules())
        read_tensors = [each for each in self._read.named_tensors() if was_read(each[1])]
        tensors = [*self._named_tensors(), *read_tensors]
        gradients = [(f"gradient of {name!r}", view) for name, view in self._named_gradients()]
        hooks = list(tables_of(self._model, self._named_params, self._optimizers))
        # Modules and tensors that the iteration reads beside the model: a frozen teacher, a
        # criterion with class weights.
        outside = found.outside(self._model)
        moded = [each for each in outside if found.reads_mode(each[1])]
        weights = [each for each in weights_of(outside) if was_read(each[1])]
        names = {id(param): name for name, param in self._named_params.items()}
        optimizers = self._optimizers
        self._kinds = [
            Places(partial(structure, modules)),
            Places(partial(tensor_places, tensors)),
            Places(partial(tensor_places, gradients, addresses_only=True)),
            Places(partial(modes, modules)),
            Places(partial(hook_places, hooks)),
            Places(partial(structure, outside), _beside),
            Places(partial(modes, moded), _beside),
            Places(partial(hook_places, list(tables_of_modules(outside))), _beside),
            Places(partial(tensor_places, weights), _beside),
            self._read,
            Places(partial(switches, self._device.type)),
            Places(partial(unit_settings, self._units, self._unit_settings)),
            *(Places(partial(optimizer_places, each, names)) for each in optimizers),
        ]
        self._ask()

    def changes(self) -> list[Change]:
        """Return what has changed since ``arm``; fast where nothing has.

        Capture: never inside one; no host sync.
        """
        if self._asked.hold():
            return []
        doubted = [kind for kind in self._kinds if not hold(kind.asks)]
        found = [change for kind in doubted for change in kind.changes()]
        if not found:
            self._ask()
        return list(dict.fromkeys(found))

    def let_go_of_moves(self) -> None:
        """Ask no more for what an iteration has just moved, as counters now and then.

        CaptureError names what has more following from it.
        """
        if self._asked.hold() or self._read is None:
            return
        refuse_deciding(self._read.let_go_of_moves(), self._ran, self._walk().places)
        self._ask()

    def stands_still(self) -> list[str]:
        """Return, once, what the recording has moved and has asked the system, in words.

        From now on it is not put back any more.
        """
        told = [*map(str, self.moves), *self._ran.asked]
        self._began = None
        self._ran.asked.clear()
        return told

    def python(self) -> Before:
        """Return Python as it is now."""
        return Before(self._walk())

    def moved(self, before: Before) -> list[Move]:
        """Return what has moved in Python since then, tensors as well."""
        return before.moves_to(self._walk(), but_for_tensors=False)

    def put_back(self) -> None:
        """Put back what has moved in Python since the recording began."""
        if self._began is not None:
            self._began.put_back(self._walk())

    def close(self) -> None:
        """Let go of everything."""
        self._kinds, self._read, self._asked = [], None, Asked(())
        self._began = None
        self.kept = []

    def _walk(self) -> Walk:
        return Walk(self._names, self._model, self._functions)

    def _ask(self) -> None:
        self._asked = Asked(ask for kind in self._kinds for ask in kind.asks)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"parameter {name!r}", p) for name, p in self._named_params.items())
        yield from ((f"parameter {name!r}", p) for name, p in self._model.named_parameters())
        yield from ((f"buffer {name!r}", b) for name, b in self._model.named_buffers())


def _beside(change: Change) -> Change:
    # It has no part in what the model's own modules decide: which gradients there are, and in which
    # mode an evaluation runs.
    return replace(change, kind=ChangeKind.ATTRIBUTE, name=f"{change.name} outside of the model")
