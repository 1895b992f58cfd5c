"""An iteration that can be undone: what Python objects point at which tensors, and the rest."""

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.modules import join
from graphfsdp._capture.trace.backend import MemoryUndo
from graphfsdp._capture.trace.source import definition_of
from graphfsdp.base.protocols import sharded_roots
from graphfsdp.base.torch_internals import buffers_of, is_functorch_wrapped, key_of, parameters_of
from graphfsdp.errors import CaptureError, HazardKind, Refuse, raised

_IN_PLACE = "Remedy: update it in place (copy_, mul_, add_, lerp_)"
_OUTSIDE = (
    "scope='forward_backward', which leaves the optimizer outside the graph; "
    "graphfsdp.optim.FusedAdam"
)


class HostState:
    """Which tensors the model, the optimizer and the gradients held before a recording.

    A replay runs no Python, so whatever an iteration re-points, a replay leaves alone. This
    compares before and after, and can put everything back.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        restore_gradients: Callable[[], None],
    ) -> None:
        self._model = model
        self._optimizers = list(map(HostOptimizer, optimizers))
        self._kept = [
            (path, module, list(map(_kept, _tables(module))))
            for path, module in model.named_modules()
        ]
        # What `tensor.data = ...` would take away; an alias keeps the memory, not the tensor.
        self._data = {
            value: value.detach()
            for *_, value in self._held()
            if isinstance(value, Tensor) and _is_plain(value)
        }
        self._restore_gradients = restore_gradients

    def check_unchanged(self, was_read: Callable[[Tensor], bool], refuse: Refuse = raised) -> None:
        for path, module, name, before in self._held():
            now = next((table[name] for table in _tables(module) if name in table), None)
            full_name, why = join(path, name), ""
            is_registered = name in parameters_of(module) or name in buffers_of(module)
            if before is now:
                if isinstance(before, Tensor) and self._has_new_data(before):
                    why = (
                        f"the iteration gave {full_name!r} new memory (.data = or set_); a replay "
                        f"would go on reading the old one. {_IN_PLACE}"
                    )
            # A plain attribute that is overwritten without being read (a kept activation) is
            # harmless: replays write into what the recorded iteration has put there.
            elif isinstance(before, Tensor) and (is_registered or was_read(before)):
                why = (
                    f"the iteration replaced {full_name!r} by a new tensor; a replay runs no "
                    f"Python and would go on reading the old one. {_IN_PLACE}"
                )
            elif type(before) in (int, float) and isinstance(now, Tensor):
                why = (
                    f"the iteration puts a tensor in the place of {full_name!r}, which was "
                    f"{before!r}; a replay runs no Python and would begin with that number for "
                    "ever. Remedy: set it at the beginning of the iteration (in loss_fn or "
                    "forward) and not behind the step; or keep a tensor and update it in place "
                    "(copy_, mul_, add_, lerp_)"
                )
            if why:
                refuse(CaptureError(why, module_path=path, source=definition_of(module)))
        for optimizer in self._optimizers:
            for change in optimizer.changes():
                refuse(change)

    def restore(self) -> None:
        for root in sharded_roots(self._model):
            root.abandon_iteration()
        for _, module, tables in self._kept:
            for table, kept in zip(_tables(module), tables, strict=True):
                for name in [key for key, value in table.items() if isinstance(value, Tensor)]:
                    if name not in kept:
                        del table[name]
                for name, value in kept.items():  # TorchScript's tables have no update()
                    table[name] = value
            module._non_persistent_buffers_set.intersection_update(buffers_of(module).keys())
        for tensor, data in self._data.items():
            if self._has_new_data(tensor):
                tensor.data = data
        for optimizer in self._optimizers:
            optimizer.restore()
        self._restore_gradients()

    def _held(self) -> Iterator[tuple[str, nn.Module, str, Any]]:
        for path, module, tables in self._kept:
            for name, value in itertools.chain.from_iterable(table.items() for table in tables):
                yield path, module, name, value

    def _has_new_data(self, tensor: Tensor) -> bool:
        old = self._data.get(tensor)
        if old is None:
            return False
        return bool(key_of(tensor.untyped_storage()) != key_of(old.untyped_storage()))


def _tables(module: nn.Module) -> Sequence[dict[str, Any]]:
    """Return where a module holds tensors and numbers."""
    return parameters_of(module), buffers_of(module), vars(module)


def _kept(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a table cannot be changed in place: tensors, counters, modes, names."""
    plain = (Tensor, type(None), bool, int, float, str)
    return {key: value for key, value in table.items() if isinstance(value, plain)}


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor lies in one storage of its own class's making."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not is_functorch_wrapped(tensor)


class HostOptimizer:
    """What an optimizer held before an iteration, to compare with and to put back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {param: dict(state) for param, state in optimizer.state.items()}
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._numbers = _numbers(vars(optimizer))

    def changes(self) -> Iterator[CaptureError]:
        """Yield a refusal of each thing that an iteration made or counted on the host."""
        for param, state in self._optimizer.state.items():
            before_state = self._state.get(param, {})
            for key, value in state.items():
                before = before_state.get(key)
                if not isinstance(value, Tensor) or before is value:
                    continue
                did = "made new state"
                remedy = "more warm-up steps, so that every parameter has been stepped once before"
                if isinstance(before, Tensor):
                    did = "puts a new tensor in the place of its state"
                    remedy = f"{_OUTSIDE}; or writing into the tensor (copy_, mul_, lerp_)"
                yield self._refusal(
                    f"{did} {key!r} for a parameter of shape {tuple(param.shape)} in the iteration "
                    f"that was recorded; each replay would start from what was there. Remedy: "
                    f"{remedy}"
                )
            where = f"its state of a parameter of shape {tuple(param.shape)}"
            yield from self._changed_numbers(_numbers(before_state), _numbers(state), where)
        for index, (before_group, group) in enumerate(
            zip(self._groups, self._optimizer.param_groups, strict=False)
        ):
            yield from self._changed_settings(index, _numbers(before_group), group)
        now = _numbers(vars(self._optimizer))
        yield from self._changed_numbers(self._numbers, now, "its attributes")

    def restore(self) -> None:
        optimizer = self._optimizer
        for param in list(optimizer.state):
            if param not in self._state:
                del optimizer.state[param]
            else:
                optimizer.state[param].clear()
                optimizer.state[param].update(self._state[param])
        vars(optimizer).update(self._numbers)
        del optimizer.param_groups[len(self._groups) :]
        for group, before_group in zip(optimizer.param_groups, self._groups, strict=False):
            group.clear()
            group.update(before_group)

    def _changed_settings(
        self, index: int, before: Mapping[str, float], after: Mapping[str, Any]
    ) -> Iterator[CaptureError]:
        for key, value in after.items():
            if key in before and (isinstance(value, Tensor) or before[key] != value):
                yield CaptureError(
                    f"the iteration changed {key!r} of group {index} of "
                    f"{type(self._optimizer).__name__} from {before[key]} to {value}; a replay "
                    "runs no Python and would leave it so. Remedy: change it after the captured "
                    "step, outside the iteration, which replays see",
                    kind=HazardKind.BAKED_NUMBER,
                    source=None,
                )

    def _changed_numbers(
        self, before: Mapping[str, float], after: Mapping[str, float], where: str
    ) -> Iterator[CaptureError]:
        for key, value in after.items():
            if before.get(key) != value:
                yield self._refusal(
                    f"changed the number {key!r} among {where} from {before.get(key)} to {value}; "
                    "a replay runs no Python and would go on with this one. Remedy: "
                    f"{_OUTSIDE}; or counting in a tensor"
                )

    def _refusal(self, what: str) -> CaptureError:
        kind = type(self._optimizer)
        return CaptureError(
            f"{kind.__name__} {what}", kind=HazardKind.OPTIMIZER, source=definition_of(kind.step)
        )


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class Attempt:
    """A warm-up or a capture: everything that it may change, as it was before."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        undo: MemoryUndo | None,
        *,
        device: torch.device,
        restore_gradients: Callable[[], None],
    ) -> None:
        self.host_state = HostState(model, optimizers, restore_gradients)
        self._restore_random_states = save_random_states(model, device)
        self._undo = undo

    def watching(self) -> AbstractContextManager[object]:
        """Run the body so that it can be undone, also when it is over."""
        return nullcontext() if self._undo is None else self._undo.watching()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Run the body, and put everything back."""
        try:
            with self.watching():
                yield
        finally:
            self.roll_back()

    def roll_back(self) -> None:
        """Put everything back.

        What Python objects refer to comes first: memory is written at the addresses that the
        model, the gradients and the optimizer had.
        """
        self.host_state.restore()
        if self._undo is not None:
            self._undo.roll_back()
        self._restore_random_states()


def save_random_states(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Remember every generator's state; return a function that puts the states back.

    Those are torch's, those that modules hold, Python's and NumPy's. Generators that only the loss
    function knows are seen when an operator draws from them, on a CPU; on a GPU they are not.
    """
    states = [(generator, generator.get_state()) for generator in generators_of(model, device)]
    python_state = random.getstate()
    numpy: Any = sys.modules.get("numpy")  # not imported for this alone
    numpy_state = None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python_state)
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)

    return restore


def generators_of(model: nn.Module, device: torch.device) -> list[torch.Generator]:
    """Return torch's generators for the CPU and the device first, then those that modules hold."""
    generators = {id(torch.default_generator): torch.default_generator}
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        generators[id(generator)] = generator
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                generators[id(value)] = value
    return list(generators.values())
