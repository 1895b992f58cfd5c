"""The host side of an iteration's state: what Python objects point at which tensors."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from graphfsdp._capture.trace.source import assignment_of
from graphfsdp._capture.undo.host_optimizer import HostOptimizer
from graphfsdp.base.sharded import sharded_roots
from graphfsdp.errors import CaptureError


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
        self._optimizers = [HostOptimizer(optimizer) for optimizer in optimizers]
        self._attributes = {
            (module_name, name): (module, value)
            for module_name, module in model.named_modules()
            for name, value in _tensor_attributes(module)
        }
        # What `tensor.data = ...` would take away; an alias keeps the memory, not the tensor.
        self._data = {
            key: tensor.detach()
            for key, (_, tensor) in self._attributes.items()
            if _is_plain(tensor)
        }
        self._plain = [(module, _plain_values(module)) for module in model.modules()]
        self._restore_gradients = restore_gradients

    def check_unchanged(self, was_read: Callable[[Tensor], bool]) -> None:
        for change in self.changes(was_read):
            raise change

    def changes(self, was_read: Callable[[Tensor], bool]) -> Iterator[CaptureError]:
        for (module_name, name), (module, before) in self._attributes.items():
            if _lookup(module, name) is before:
                if self._has_new_data((module_name, name)):
                    yield CaptureError(
                        f"the iteration gave {_join(module_name, name)!r} new memory (.data = or "
                        "set_); a replay would go on reading the old one. Remedy: update it in "
                        "place (copy_, mul_, add_, lerp_)",
                        module_path=module_name,
                        source=assignment_of(module, name, self._model),
                    )
                continue
            # A plain attribute that is overwritten without being read (a kept activation) is
            # harmless: replays write into what the recorded iteration has put there.
            if _is_registered(module, name) or was_read(before):
                yield CaptureError(
                    f"the iteration replaced {_join(module_name, name)!r} by a new tensor; a "
                    "replay runs no Python and would go on reading the old one. Remedy: update "
                    "it in place (copy_, mul_, add_, lerp_)",
                    module_path=module_name,
                    source=assignment_of(module, name, self._model),
                )
        for optimizer in self._optimizers:
            yield from optimizer.changes()

    def restore(self) -> None:
        for root in sharded_roots(self._model):
            root.abandon_iteration()
        self._restore_attributes()
        for key, (module, before) in self._attributes.items():
            if _lookup(module, key[1]) is not before:
                _assign(module, key[1], before)
            if self._has_new_data(key):
                before.data = self._data[key]
        for optimizer in self._optimizers:
            optimizer.restore()
        self._restore_gradients()

    def _restore_attributes(self) -> None:
        """Take away tensors that modules did not hold, and put their plain values back."""
        for module_name, module in self._model.named_modules():
            for name, _ in list(_tensor_attributes(module)):
                if (module_name, name) not in self._attributes:
                    delattr(module, name)
        for module, values in self._plain:
            vars(module).update(values)

    def _has_new_data(self, key: tuple[str, str]) -> bool:
        old = self._data.get(key)
        if old is None:
            return False
        new = self._attributes[key][1]
        return bool(new.untyped_storage()._cdata != old.untyped_storage()._cdata)


def _plain_values(module: nn.Module) -> dict[str, object]:
    """Return what a module has that cannot be changed in place: counters, modes, names."""
    plain = (type(None), bool, int, float, str)
    return {key: value for key, value in vars(module).items() if isinstance(value, plain)}


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor lies in one storage of its own class's making."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _tensor_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, p) for name, p in module._parameters.items() if p is not None)
    yield from ((name, b) for name, b in module._buffers.items() if b is not None)
    yield from ((name, v) for name, v in vars(module).items() if isinstance(v, Tensor))


def _is_registered(module: nn.Module, name: str) -> bool:
    return name in module._parameters or name in module._buffers


def _lookup(module: nn.Module, name: str) -> object:
    for table in (module._parameters, module._buffers, vars(module)):
        if name in table:
            return table[name]
    return None


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    if isinstance(value, nn.Parameter):
        module._parameters[name] = value
    elif name in module._buffers:
        module._buffers[name] = value
    else:
        vars(module)[name] = value


def _join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name
