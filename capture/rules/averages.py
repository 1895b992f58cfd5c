"""torch's average of a model's weights, updated within an iteration without a look at its count."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from graphfsdp._capture.trace.source import called_function


@contextmanager
def averages_without_looks() -> Iterator[None]:
    """Have ``AveragedModel.update_parameters`` decide on the device whether it is the first.

    It asks on the host how many models it has averaged, to copy the first one. Here it always
    averages, and the first one is chosen by ``torch.where``: with the same bits, also after a
    load that sets the count back.

    Capture: no host sync; it allocates a copy of the averaged tensors.
    """
    as_written = AveragedModel.update_parameters

    def update_parameters(average: AveragedModel, model: nn.Module) -> None:
        is_first = average.n_averaged == 0
        with _NeverTheFirst(average.n_averaged):
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
    return chain(module.parameters(), module.buffers() if average.use_buffers else ())


class _NeverTheFirst(TorchFunctionMode):
    """Answers what is asked of a count as if it were above zero."""

    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self._answers = {Tensor.__eq__: False, Tensor.gt: True}
        self._count = count

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in self._answers and args[0] is self._count:
            return self._answers[func]
        return called_function(func)(*args, **(kwargs or {}))
