"""What torch and libraries look at on the host within an iteration, answered without a look."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphfsdp._capture.trace.source import called_function, frames

_MASKS = "transformers.masking_utils"
_NUM_OF_MODES = 10  # frames between a torch function and who has called it, at most
_Function = Callable[..., Any]


class Instead(TorchFunctionMode):
    """Has some of torch's functions answered by another one."""

    def __init__(self, answer: Callable[[_Function, Sequence[Any], Mapping[str, Any]], Any]):
        """``answer`` returns NotImplemented where torch is to do it."""
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self,
        func: _Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        answer = self._answer(func, args, kwargs)
        return called_function(func)(*args, **kwargs) if answer is NotImplemented else answer


def one_hot(function: _Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do what one_hot does, without a look at the values.

    On a CPU (only there) torch reads the classes on the host to check their range. With a given
    number of classes the read decides nothing, so it is left out.
    """
    if function is not torch.nn.functional.one_hot:
        return NotImplemented
    num_classes = int(kwargs.get("num_classes", args[1] if len(args) > 1 else -1))
    if num_classes <= 0:
        return NotImplemented
    tensor = args[0] if args else kwargs["tensor"]
    result = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return result.scatter_(-1, tensor.unsqueeze(-1), 1)


def all_masks(function: _Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Have models of transformers make every mask, without a look at what it hides.

    They skip one that hides nothing, for which they read it. The answer "something is hidden" is
    always right, and is what they take it for where they know that they are traced.
    """
    if function is not Tensor.__bool__:
        return NotImplemented
    callers = itertools.islice(frames(), _NUM_OF_MODES)
    asks = any(frame.f_globals.get("__name__") == _MASKS for frame in callers)
    return False if asks else NotImplemented


@contextmanager
def without_looks() -> Iterator[None]:
    """Enter this around an iteration, eager, recorded or evaluated alike."""
    with Instead(all_masks) if _MASKS in sys.modules else nullcontext():
        yield
