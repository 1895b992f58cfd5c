"""What torch and libraries look at on the host within an iteration, answered without a look."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from graphfsdp._capture.trace.source import called_function, frames
from graphfsdp.base.torch_internals import tree_leaves, tree_map

_MASKS = "transformers.masking_utils"
_WARNS = "warn_if_padding_and_no_attention_mask"  # of transformers, which looks for that alone
_NUM_OF_MODES = 10  # frames between a torch function and who has called it, at most
_Function = Callable[..., Any]
_MOST_NUMBERS = 2**24  # of a twin
_MAKERS = (torch.arange, torch.ones)
# What positions and masks are made of between that and the look.
_MADE_OF_NUMBERS = (
    *_MAKERS,
    *(Tensor.add, Tensor.sub, Tensor.unsqueeze, Tensor.expand, Tensor.__getitem__, Tensor.to),
    *(torch.diff, Tensor.ne, Tensor.cumsum, Tensor.__eq__, Tensor.all, torch.all, Tensor.sum),
)


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


class _Masks:
    """Answers what models of transformers ask about masks, without a look at the iteration.

    They skip a mask that hides nothing, for which they read it. The answer "something is hidden"
    is always right, and is what they take it for where they know that they are traced. Where
    nobody has given them mask or positions, they make both of numbers alone: such tensors have a
    twin on the host, whose values answer as a loop that runs as written does.
    """

    def __init__(self) -> None:
        # With the version that it had: what is written since then, nobody knows.
        self._twins: MutableMapping[Tensor, tuple[int, Tensor]] = WeakIdKeyDictionary()

    def answer(self, function: _Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function in (Tensor.__bool__, Tensor.__contains__):
            callers = [*itertools.islice(frames(), _NUM_OF_MODES)]
            if any(frame.f_code.co_name == _WARNS for frame in callers):
                return False
            asks = any(frame.f_globals.get("__name__") == _MASKS for frame in callers)
            if not asks or function is Tensor.__contains__:
                return NotImplemented
            twin = self._twin_of(args[0])
            with _out_of_sight():
                return twin is not None and bool(twin)
        if function not in _MADE_OF_NUMBERS:
            return NotImplemented
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        twins = {id(each): self._twin_of(each) for each in given}
        if any(twin is None for twin in twins.values()) or not (given or function in _MAKERS):
            return NotImplemented
        result: Tensor = called_function(function)(*args, **kwargs)
        if result.is_inference() or result.numel() > _MOST_NUMBERS:
            return result
        on_host = {"device": torch.device("cpu")} if function in _MAKERS else {}
        with _out_of_sight():
            there, named = tree_map(lambda each: twins.get(id(each), each), (args, dict(kwargs)))
            if function is Tensor.to:  # perhaps to a device
                there, named = (there[0], result.dtype), {}
            self._twins[result] = result._version, function(*there, **named | on_host)
        return result

    def _twin_of(self, tensor: Tensor) -> Tensor | None:
        version, twin = self._twins.get(tensor, (0, None))
        return None if twin is None or version != tensor._version else twin


@contextmanager
def _out_of_sight() -> Iterator[None]:
    """Have no mode see what the body computes."""
    with torch._C._DisableTorchDispatch(), torch.DisableTorchFunction():
        yield


@contextmanager
def without_looks() -> Iterator[None]:
    """Enter this around an iteration, eager, recorded or evaluated alike."""
    masks = Instead(_Masks().answer) if _MASKS in sys.modules else nullcontext()
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
