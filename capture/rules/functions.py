"""Torch functions that reach the host without an operator, judged by the Python function called."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphfsdp._capture.rules.refusals import (
    HOST_READ,
    HOST_WRITE,
    RAW_ADDRESS,
    READ_IN_A_LIST,
    Refusal,
    Varies,
)
from graphfsdp._capture.trace.source import called_by_user
from graphfsdp.base.op_tensors import flat_tensors

_Function = Callable[..., Any]
_Judged = tuple[str, Refusal] | None

_READERS = ("tolist", "numpy", "cpu", "__array__", "__repr__", "__format__", "__dlpack__")
# These run a Python function on every element, below all operators.
_WRITERS = ("apply_", "map_", "map2_")
# torch reads a number through these; each is an operator too, unless torch's own C++ calls it.
_NUMBERS = ("__float__", "__index__", "__int__", "__bool__", "__complex__", "item")
# torch makes these up of operators whose arguments it reads from a tensor's memory.
_SPLITTING = (torch.tensor_split, Tensor.tensor_split, torch._VF._pad_packed_sequence)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


class FunctionRules:
    """Host reads and writes that no dispatch mode sees."""

    def __init__(self, device_type: str) -> None:
        self._on_cpu = device_type == "cpu"
        self._readers = {getattr(Tensor, name): f"Tensor.{name}" for name in _READERS}
        self._numbers = {getattr(Tensor, name): f"Tensor.{name}" for name in _NUMBERS}
        self._writers = {getattr(Tensor, name): f"Tensor.{name}" for name in _WRITERS}
        self._literals = {
            torch.tensor: "torch.tensor",
            torch.as_tensor: "torch.as_tensor",
            torch.asarray: "torch.asarray",
            Tensor.new_tensor: "Tensor.new_tensor",
            Tensor.new: "Tensor.new",
        }

    def refuse(
        self, function: _Function, args: Sequence[Any], kwargs: Mapping[str, Any], varies: Varies
    ) -> _Judged:
        if function in self._writers:
            name = self._writers[function]
            return name, HOST_WRITE.of(name)
        if function in self._literals:
            return _judge_lists(self._literals[function], [*args, *kwargs.values()], varies)
        if function in _INDEXING:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return _judge_lists(f"Tensor.{function.__name__}", index, varies)
        if function is Tensor.data_ptr and self._on_cpu:
            name = "Tensor.data_ptr"
            return (name, RAW_ADDRESS.of(name)) if called_by_user() else None
        if function in _SPLITTING:
            name = function.__name__
            lengths = [item for item in (*args[1:], *kwargs.values()) if isinstance(item, Tensor)]
            return (name, HOST_READ.of(name)) if any(map(varies, lengths)) else None
        name = self._readers.get(function, "")
        if not name and function is Tensor.to and self._goes_to_cpu(args, kwargs):
            name = "Tensor.to('cpu')"
        return _judge_read(name, args, varies)

    def refuse_unseen_read(
        self, function: _Function, args: Sequence[Any], varies: Varies
    ) -> _Judged:
        """Judge a call that no operator came of, as of the legacy constructor ``torch.Tensor``."""
        return _judge_read(self._numbers.get(function, ""), args, varies)

    def seal(self, result: Any) -> Any:
        """Return what a permitted function returned, with NumPy's window on it closed for writing.

        The array of a constant shares its memory, and no operator would tell of a write.
        """
        if isinstance(result, np.ndarray):
            result.flags.writeable = False
        return result

    def _goes_to_cpu(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        if isinstance(target, str):
            return torch.device(target).type == "cpu"
        # On a CPU, `x.to(y.device)` is the device-agnostic idiom and no host read on CUDA.
        return not self._on_cpu and isinstance(target, torch.device) and target.type == "cpu"


def _judge_read(name: str, args: Sequence[Any], varies: Varies) -> _Judged:
    if not name or not isinstance(args[0], Tensor) or not varies(args[0]):
        return None
    return name, HOST_READ.of(name)


def _judge_lists(name: str, values: Sequence[Any], varies: Varies) -> _Judged:
    # A list is turned into a tensor number by number; a tensor as it is makes an operator.
    lists = [value for value in values if isinstance(value, list | tuple)]
    if not any(map(varies, flat_tensors(lists))):
        return None
    return name, READ_IN_A_LIST.of(f"{name} with a tensor inside a list")
