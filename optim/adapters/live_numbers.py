"""Numbers of an optimizer of torch that its step reads from tensors, where its Python has floats.

A learning rate that changes between replays is a 0-D tensor while a step is recorded, and a step
count is one anyway; the plain path of torch's would read both on the host.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class LiveScalars(TorchFunctionMode):
    """Keeps on the device what optimizers take for numbers of Python.

    The plain path of torch's reads the step count, computes with it in Python and hands the result
    to operators as ``alpha`` or ``value``. A read gives a 0-D tensor in Python's precision here;
    an operator that takes numbers only is called as one that takes tensors: with the same bits.

    A number takes the dtype of the tensor that it meets. 0-D tensors do so where the other has
    dimensions; where it has none either (an lr that is a tensor, the product of NAdam's momenta)
    the stand-ins for numbers are known, and cast before they meet it.
    """

    def __init__(self, rates: Iterable[Tensor | None] = (), *, reads_late: bool = False) -> None:
        """``rates``: [] each, tensors that stand for numbers of the groups.

        ``reads_late``: operators of a CPU may read numbers when they run.
        """
        super().__init__()
        self._reads_late = reads_late
        self._numbers = {id(rate): rate for rate in rates if rate is not None}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "item":
            return self._number(args[0].to(torch.float64, copy=True))
        factor = kwargs.get(_FACTORS.get(name, ""))
        if not isinstance(factor, Tensor):
            if name == "div" and self._is_number(args[0]) and not self._is_number(args[1]):
                # So torch divides a number by a tensor.
                func, args = Tensor.mul, (args[1].reciprocal(), args[0])
            return self._compute(func, args, kwargs)
        target, *others = args
        if others[0].is_sparse:  # what no graph holds, and the plain step of before may be given
            return func(*args, **{**kwargs, _FACTORS[name]: factor.item()})
        # In 16 bits what is added is rounded once or twice, by its place in memory.
        reads_late = self._reads_late and not torch.is_grad_enabled()
        if target.dtype.itemsize < 4 and reads_late and type(target) in _ON_A_CPU:
            with_factor_(target, others, factor, name)
            return target
        # The others are computed in float32 there, and rounded once.
        if target.dtype.itemsize < 4 and name != "add_":
            wide = [tensor.float() for tensor in (target, *others)]
            self.__torch_function__(func, types, wide, kwargs)
            return target.copy_(wide[0])
        factor = factor.to(target.dtype)
        if name == "add_":
            return target.addcmul_(others[0], factor)
        return func(target, others[0] * factor, *others[1:])

    def _compute(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        others = [tensor for tensor in tensors if not self._is_number(tensor)]
        if not tensors or len(others) == len(tensors):
            return func(*args, **kwargs)
        if not others:
            result = func(*args, **kwargs)
            return self._number(result) if isinstance(result, Tensor) else result
        if any(tensor.dim() for tensor in others):
            return func(*args, **kwargs)
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in others))
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        # In 16 bits numbers are not rounded before what is computed with them is.
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        met = [arg.to(wide) if self._is_number(arg) else arg for arg in args]
        result = func(*met, **kwargs)
        return result.to(dtype) if isinstance(result, Tensor) and result.dtype is wide else result

    def _is_number(self, operand: object) -> bool:
        return id(operand) in self._numbers

    def _number(self, result: Tensor) -> Tensor:
        self._numbers[id(result)] = result
        return result


_FACTORS: Mapping[str, str] = MappingProxyType(
    {"add_": "alpha", "addcdiv_": "value", "addcmul_": "value"}
)


def _with_factor(target: Tensor, others: list[Tensor], factor: Tensor, name: str) -> None:
    getattr(target, name)(*others, **{_FACTORS[name]: factor.item()})


_ON_A_CPU = (Tensor, nn.Parameter)
_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")  # a registration lives as long as it
_LIBRARY.define("with_factor_(Tensor(a!) target, Tensor[] others, Tensor factor, str name) -> ()")
_LIBRARY.impl("with_factor_", _with_factor, "CPU")
with_factor_: Callable[..., None] = torch.ops.graphfsdp.with_factor_.default
