"""What must not have changed between two replays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.guards.around import AroundGuard, OutsideModules
from graphfsdp._capture.guards.functions import FunctionGuard, Surroundings
from graphfsdp._capture.guards.hooks import HookGuard, users_hooks
from graphfsdp._capture.guards.modules import AttributeGuard, StructureGuard
from graphfsdp._capture.guards.optimizer import OptimizerGuard
from graphfsdp._capture.guards.settings import SettingsGuard
from graphfsdp._capture.guards.tensors import TensorGuard
from graphfsdp._capture.guards.values import ValueGuard, contents
from graphfsdp._capture.trace.attribute_log import AttributeLog
from graphfsdp.base.changes import Change


class Guard(Protocol):
    """Watches one sort of thing that a graph has baked in."""

    def holds(self) -> bool:
        """Tell quickly that nothing has changed; False means: look closely."""
        ...

    def changes(self) -> list[Change]:
        """Compare everything and name what has changed; maybe nothing that matters."""
        ...


class Guards:
    """All that a replay takes for granted, compared before each.

    A replay goes on with the memory, the modules, the numbers and the switches that it was
    recorded with, without an error. So each difference has to be found before it runs.

    Not seen is what no name in code leads to; see Note [Surroundings].
    """

    def __init__(
        self,
        model: nn.Module,
        named_params: Mapping[str, nn.Parameter],
        gradients: PersistentGradients,
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        functions: Sequence[Callable[..., Any]],
        device: torch.device,
    ) -> None:
        """Prepare; ``arm`` comes when the iteration has been recorded.

        Args:
            model: The model.
            named_params: Trainable parameters by full name.
            gradients: Their persistent gradients.
            optimizers: Those that step inside the graph.
            functions: The loss function, or the user's iteration.
            device: Where everything lies.
        """
        self._model = model
        self._named_params = named_params
        self._gradients = gradients
        self._optimizers = optimizers
        self._functions = functions
        self._device = device
        self._log = AttributeLog()
        self._around = Surroundings(
            [*functions, *users_hooks(model, named_params, optimizers)], model
        )
        self._values: dict[str, object] = {}  # around functions, before the recording
        self._before: dict[int, tuple[Any, Any]] = {}  # containers of modules, with copies
        self._guards: tuple[Guard, ...] = ()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Enter while the iteration is recorded."""
        self._before = contents(self._model)
        self._values = self._around.values()
        own = set(map(id, self._model.modules()))

        def meet(module: nn.Module) -> None:
            if id(module) not in own and "_modules" in vars(module):  # one that is made
                self._before |= contents(module)

        with self._log.noting(meet):
            yield

    def arm(self, was_read: Callable[[Tensor], bool]) -> None:
        """Remember everything as it is now.

        Args:
            was_read: Tells whether the recording has touched a tensor's storage.

        Raises:
            CaptureError: the iteration has counted in Python, and decides by the count.
        """
        self._log.stop()
        for refusal in self._around.refusals():
            raise refusal
        attributes = AttributeGuard(self._model, self._log, was_read)
        values = ValueGuard(self._model, self._log, self._before)
        outside = OutsideModules(self._model, self._log)
        find = partial(self._around.find, self._log, outside)
        functions = FunctionGuard(find, self._values, self._log, was_read)
        tensors = functions.named_tensors()
        around = AroundGuard(outside, self._log, was_read, tensors, self._before)
        functions.leave_out(values.known() | around.known)
        self._values, self._before = {}, {}
        names = {id(param): name for name, param in self._named_params.items()}
        self._guards = (
            StructureGuard(self._model),
            TensorGuard([*self._named_tensors(), *attributes.named_tensors()]),
            TensorGuard(
                ((f"gradient of {name!r}", view) for name, view in self._gradients.named_views()),
                addresses_only=True,
            ),
            attributes,
            values,
            HookGuard(self._model, self._named_params, self._optimizers),
            around,
            functions,
            SettingsGuard(self._device.type),
            *(OptimizerGuard(optimizer, names) for optimizer in self._optimizers),
        )

    def changes(self) -> list[Change]:
        """Return what has changed since ``arm``; fast where nothing has.

        Capture: never inside one; no host sync.
        """
        if all([guard.holds() for guard in self._guards]):
            return []
        found = [change for guard in self._guards for change in guard.changes()]
        return list(dict.fromkeys(found))

    def close(self) -> None:
        """Let go of everything."""
        self._guards = ()

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"parameter {name!r}", p) for name, p in self._named_params.items())
        yield from ((f"parameter {name!r}", p) for name, p in self._model.named_parameters())
        yield from ((f"buffer {name!r}", b) for name, b in self._model.named_buffers())
