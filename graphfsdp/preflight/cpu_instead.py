"""Gives a program the CPU where it asks for a GPU, so that it can be checked without one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CpuInstead(TorchFunctionMode):
    """Rewrites ``device="cuda"``, ``.to("cuda")``, ``.cuda()`` and ``.pin_memory()``.

    Calls of torch.cuda itself (streams, events, ``set_device``) go where they always went.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function with its devices replaced."""
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        given = {name: _replaced(value, name) for name, value in (kwargs or {}).items()}
        if func is Tensor.to:
            args = [_replaced(value, "device") for value in args]
        return func(*args, **given)


def _replaced(value: Any, name: str) -> Any:
    if name == "pin_memory":
        return False
    if name != "device":
        return value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cpu")  # the number of a GPU
    return value
