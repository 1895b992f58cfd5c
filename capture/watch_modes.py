"""The two modes of torch through which a watcher sees what runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphfsdp._capture.op_tensors import computes_nothing, is_wrapper_subclass
from graphfsdp._capture.rules import Refusal, higher_order


class Judge(Protocol):
    """Whoever is shown what runs; it runs it."""

    def dispatch(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Take an operator call."""
        ...

    def on_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Take a call of a torch function."""
        ...

    def refuse(self, op: str, refusal: Refusal) -> None:
        """Take note of what is neither; may raise."""
        ...


class DispatchMode(TorchDispatchMode):
    """Shows every operator to a judge, wrapper tensors being taken apart first."""

    # So that torch.cond and its like arrive here, to be refused by name.
    supports_higher_order_operators = True

    def __init__(self, judge: Judge) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._judge = judge

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if computes_nothing():
            return func(*args, **(kwargs or {}))
        if any(is_wrapper_subclass(kind) for kind in types):
            return NotImplemented  # it desugars itself; its inner operators come back here
        if not isinstance(func, torch._ops.OpOverload):
            self._judge.refuse(str(func), higher_order(str(func)))
            return func(*args, **(kwargs or {}))
        return self._judge.dispatch(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Shows every torch function that Python calls to a judge."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._judge.on_function(func, args, kwargs or {})


def is_watching_mode(mode: object) -> bool:
    """Tell whether a dispatch mode is the one of a recording."""
    return isinstance(mode, DispatchMode)


__all__ = ["DispatchMode", "FunctionMode", "Judge", "is_watching_mode"]
