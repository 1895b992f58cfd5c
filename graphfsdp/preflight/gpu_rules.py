"""Watches an iteration on a CPU by the rules of a GPU, on which the model would lie."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device as torch_device

from graphfsdp._capture.rules.refusals import UNSUPPORTED, Refusal
from graphfsdp._capture.rules.watcher import Watcher
from graphfsdp._capture.trace.values import StorageInfo
from graphfsdp.base.op_tensors import OpCall, flat_tensors, storage_key
from graphfsdp.errors import HazardKind, HazardLog

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


class GpuRules(Watcher):
    """Notes what a GPU would refuse as well: tensors that the iteration makes in host memory.

    On a CPU, these are the ones made without ``device=``: moving one to a GPU inside an iteration
    is what a capture does not permit. Everything else is taken to lie where the model does.
    """

    def __init__(self, model: nn.Module, device: torch.device, hazards: HazardLog) -> None:
        super().__init__(model, device, hazards=hazards)
        # What is made in host memory, and whether its maker takes device=.
        self._on_host: dict[StorageInfo | None, bool] = {}
        self._factories = {*torch_device._device_constructors(), *_LITERALS}

    def varies(self, tensor: Tensor) -> bool:
        """Tell whether a read of a tensor on the host is one that a capture does not permit."""
        return not self._lies_on_host(tensor) or super().varies(tensor)

    def on_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if self.num_quiet:
            return super().on_function(function, args, kwargs)
        name = self._moves_host_data(function, args, kwargs)
        if name:
            what = "builds a tensor from Python data"
            if function in _MOVES:
                what = "moves a tensor that the iteration made in host memory"
            self.refuse(name, _PAGEABLE.of(f"{name} {what}"))
        result = super().on_function(function, args, kwargs)
        made = flat_tensors([result])
        if _moves(function, args, kwargs):
            self._forget(made)
        elif function in self._factories and not any(isinstance(a, Tensor) for a in args):
            if _names_device(function, kwargs):
                self._forget(made)
            else:
                self._add(made, takes_device=True)
        return result

    def _moves_host_data(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str:
        """Return the name of a function that brings data of the host onto the device, else ""."""
        if function in _LITERALS:
            position = 1 if function is Tensor.new_tensor else 0
            data = kwargs.get("data", args[position] if len(args) > position else None)
            is_empty = isinstance(data, list | tuple) and not data  # there is nothing to copy
            if isinstance(data, Tensor) or is_empty or not _names_device(function, kwargs):
                return ""
            return f"torch.{function.__name__}"
        if _moves(function, args, kwargs) and self._lies_on_host(args[0]):
            return f"Tensor.{function.__name__}"
        return ""

    def judge_op(self, call: OpCall) -> Refusal | None:
        return super().judge_op(call) or self._judge_host_tensors(call)

    def _judge_host_tensors(self, call: OpCall) -> Refusal | None:
        on_host = [tensor for tensor in call.tensors if self._lies_on_host(tensor)]
        if not on_host or len(on_host) == len(call.tensors):
            return None
        has_dims = any(tensor.dim() > 0 for tensor in on_host)
        if has_dims or call.schema_name == "aten::copy_":
            takes_device = self._take_device(on_host)
            self._forget(on_host)  # told once
            if call.schema_name not in _MIXED and takes_device:
                # No GPU runs that eagerly either: the program was written for one device.
                return None
            return _PAGEABLE.of(f"{call.op} takes a tensor that the iteration made in host memory")
        changes = super().varies
        if any(map(changes, on_host)):
            self._forget(on_host)
            return _DRAWN_ON_HOST.of(call.op)
        return None

    def note_results(self, call: OpCall, infos: Sequence[StorageInfo], result: Any) -> None:
        super().note_results(call, infos, result)
        if call.is_literal:
            self._add(flat_tensors([result]), takes_device=False)
        elif call.tensors and all(map(self._lies_on_host, call.tensors)):
            self._add(flat_tensors([result]), takes_device=self._take_device(call.tensors))

    def _lies_on_host(self, tensor: Tensor) -> bool:
        return self._info_of(tensor) in self._on_host

    def _take_device(self, tensors: Sequence[Tensor]) -> bool:
        return all(self._on_host[self._info_of(tensor)] for tensor in tensors)

    def _add(self, tensors: Sequence[Tensor], *, takes_device: bool) -> None:
        for info in map(self._info_of, tensors):
            if info is not None and not info.external:
                self._on_host[info] = takes_device or self._on_host.get(info, False)

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Take tensors to lie where the model does from now on."""
        for tensor in tensors:
            self._on_host.pop(self._info_of(tensor), None)

    def _info_of(self, tensor: Tensor) -> StorageInfo | None:
        return self.storages.get(storage_key(tensor))


def _names_device(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    if function is Tensor.new_tensor or kwargs.get("device") is not None:
        return True
    modes = _get_current_function_mode_stack()
    return any(isinstance(mode, torch_device.DeviceContext) for mode in modes)


def _moves(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call brings a tensor onto a device."""
    if function is not Tensor.to:
        return function in _MOVES
    targets = [*args[1:], kwargs.get("device"), kwargs.get("other")]
    return any(isinstance(item, torch.device | str | Tensor) for item in targets) or any(
        isinstance(item, int) and not isinstance(item, bool) for item in args[1:2]
    )
