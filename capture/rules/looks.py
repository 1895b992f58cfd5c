"""What torch and libraries look at on the host within an iteration, answered without a look."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
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


@contextmanager
def without_looks_of_one_hot() -> Iterator[None]:
    """Enter this around an iteration: what runs again in its backward pass is answered as well.

    torch.autograd.backward is a torch function itself, and a mode is off while one of those runs.
    """
    mode = Instead(one_hot)
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    try:
        with mode:
            yield
    finally:
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]


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
    masks = Instead(all_masks) if _MASKS in sys.modules else nullcontext()
    with masks, _averages_without_looks():
        yield


@contextmanager
def _averages_without_looks() -> Iterator[None]:
    """Have ``AveragedModel.update_parameters`` decide on the device whether it is the first.

    It asks on the host how many models it has averaged, to copy the first one. Here it always
    averages, and the first one is chosen by ``torch.where``: with the same bits, also after a
    load that sets the count back.

    Capture: no host sync; it allocates a copy of the averaged tensors.
    """
    as_written = AveragedModel.update_parameters
    answers = {Tensor.__eq__: False, Tensor.gt: True}  # as if the count were above zero

    def update_parameters(average: AveragedModel, model: nn.Module) -> None:
        def never_the_first(
            function: _Function, args: Sequence[Any], kwargs: Mapping[str, Any]
        ) -> Any:
            asks = function in answers and args[0] is average.n_averaged
            return answers[function] if asks else NotImplemented

        is_first = average.n_averaged == 0
        with Instead(never_the_first):
            as_written(average, model)
        with torch.no_grad():
            means, weights = (_averaged(each, average) for each in (average.module, model))
            for mean, new in zip(means, weights, strict=False):  # as torch has it
                mean.copy_(torch.where(is_first.to(mean.device), new.to(mean.device), mean))

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        AveragedModel.update_parameters = as_written  # type: ignore[method-assign]


def _averaged(module: nn.Module, average: AveragedModel) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers() if average.use_buffers else ())
