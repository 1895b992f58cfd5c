"""Which tensors a program makes in host memory, told apart on a machine that has only a CPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device as torch_device

from graphfsdp._capture.rules.refusals import UNSUPPORTED, Refusal
from graphfsdp._capture.trace.values import StorageInfo, StorageTable
from graphfsdp.base.hazards import HazardKind
from graphfsdp.base.op_tensors import OpCall, flat_tensors, storage_key

_PAGEABLE = Refusal(
    "{}; on a GPU that is a copy from pageable host memory inside the iteration, which a capture "
    "does not permit, and a replay would repeat the old contents",
    "make it on the device without host data (torch.full, torch.arange, ... with "
    "device=x.device), or make it once before the loop (a buffer)",
    HazardKind.HOST_TENSOR,
    UNSUPPORTED,
)
_DRAWN_ON_HOST = Refusal(
    "{} takes a number that was drawn in host memory (a 0-D tensor made without device=); on a GPU "
    "it is baked into the kernel's arguments",
    "draw on the device: pass device=x.device",
    HazardKind.BAKED_NUMBER,
)
# What takes tensors in host memory beside those of a GPU.
_MIXED = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::copy_"}
)
_LITERALS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_MOVES = (Tensor.to, Tensor.cuda, Tensor.type_as)


class HostTensors:
    """The tensors that would lie in host memory if the model lay on a GPU.

    On a CPU, these are the ones made without ``device=``: moving one to a GPU inside an iteration
    is what a capture does not permit. Everything else is taken to lie where the model does.
    """

    def __init__(self, storages: StorageTable) -> None:
        self._storages = storages
        self._found: dict[StorageInfo | None, bool] = {}  # and whether its maker takes device=
        self._factories = {*torch_device._device_constructors(), *_LITERALS}

    def holds(self, tensor: Tensor) -> bool:
        return self._info(tensor) in self._found

    def judge_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, Refusal] | None:
        if function in _LITERALS:
            position = 1 if function is Tensor.new_tensor else 0
            data = kwargs.get("data", args[position] if len(args) > position else None)
            name = f"torch.{function.__name__}"
            if isinstance(data, Tensor) or not _names_device(function, kwargs):
                return None
            if isinstance(data, list | tuple) and not data:
                return None  # there is nothing to copy
            return name, _PAGEABLE.of(f"{name} builds a tensor from Python data")
        if function in _MOVES and args and isinstance(args[0], Tensor) and self.holds(args[0]):
            if function is Tensor.to and not _moves(args[1:], kwargs):
                return None
            name = f"Tensor.{function.__name__}"
            return name, _PAGEABLE.of(
                f"{name} moves a tensor that the iteration made in host memory"
            )
        return None

    def note_function(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        if function in _MOVES and (function is not Tensor.to or _moves(args[1:], kwargs)):
            self.forget(flat_tensors([result]))
        elif function in self._factories and not any(isinstance(a, Tensor) for a in args):
            if _names_device(function, kwargs):
                self.forget(flat_tensors([result]))
            else:
                self._add(flat_tensors([result]), takes_device=True)

    def judge_op(self, call: OpCall, varies: Callable[[Tensor], bool]) -> Refusal | None:
        on_host = [tensor for tensor in call.tensors if self.holds(tensor)]
        if not on_host or len(on_host) == len(call.tensors):
            return None
        has_dims = any(tensor.dim() > 0 for tensor in on_host)
        if has_dims or call.schema_name == "aten::copy_":
            takes_device = self._take_device(on_host)
            self.forget(on_host)  # told once
            if call.schema_name not in _MIXED and takes_device:
                # No GPU runs that eagerly either: the program was written for one device.
                return None
            return _PAGEABLE.of(f"{call.op} takes a tensor that the iteration made in host memory")
        if any(varies(tensor) for tensor in on_host):
            self.forget(on_host)
            return _DRAWN_ON_HOST.of(call.op)
        return None

    def note_op(self, call: OpCall, results: Sequence[Tensor]) -> None:
        if call.is_literal:
            self._add(results, takes_device=False)
        elif call.tensors and all(map(self.holds, call.tensors)):
            self._add(results, takes_device=self._take_device(call.tensors))

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Take tensors to lie where the model does from now on."""
        for tensor in tensors:
            self._found.pop(self._info(tensor), None)

    def _add(self, tensors: Sequence[Tensor], *, takes_device: bool) -> None:
        for info in map(self._info, tensors):
            if info is not None and not info.external:
                self._found[info] = takes_device or self._found.get(info, False)

    def _take_device(self, tensors: Sequence[Tensor]) -> bool:
        return all(self._found[self._info(tensor)] for tensor in tensors)

    def _info(self, tensor: Tensor) -> StorageInfo | None:
        return self._storages.get(storage_key(tensor))


def _names_device(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    if function is Tensor.new_tensor or kwargs.get("device") is not None:
        return True
    modes = _get_current_function_mode_stack()
    return any(isinstance(mode, torch_device.DeviceContext) for mode in modes)


def _moves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    targets = [*args, kwargs.get("device"), kwargs.get("other")]
    return any(isinstance(item, torch.device | str | Tensor) for item in targets) or any(
        isinstance(item, int) and not isinstance(item, bool) for item in args[:1]
    )
