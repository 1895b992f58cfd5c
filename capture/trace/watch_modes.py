"""The two modes of torch through which a watcher sees what runs, and a base for others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphfsdp._capture.rules.refusals import Refusal, higher_order
from graphfsdp._capture.trace.op_tensors import computes_nothing, is_wrapper_subclass


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


class OperatorMode(TorchDispatchMode):
    """Shows operators to whoever derives from it, wrapper tensors being taken apart first."""

    # So that torch.cond and its like arrive here, and are refused by name where their turn comes.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if computes_nothing():
            return func(*args, **kwargs)
        if any(is_wrapper_subclass(kind) for kind in types):
            return NotImplemented  # it desugars itself; its inner operators come back here
        if isinstance(func, torch._ops.OpOverload):
            return self.on_op(func, args, kwargs)
        return self.on_higher_order(func, args, kwargs)

    def on_op(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operator, and return its result."""
        return op(*args, **kwargs)

    def on_higher_order(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run what is made of operators and is none itself."""
        return func(*args, **kwargs)


class DispatchMode(OperatorMode):
    """Shows every operator to a judge."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    def on_op(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Have it judged and run."""
        return self._judge.dispatch(op, args, kwargs)

    def on_higher_order(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Have it refused, and run it where refusals are deferred."""
        self._judge.refuse(str(func), higher_order(str(func)))
        return func(*args, **kwargs)


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
