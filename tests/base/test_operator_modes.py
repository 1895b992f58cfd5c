"""Modes that look on at operators: they join one another, and each sees every operator once."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphfsdp.base.op_tensors import OpCall, OperatorMode, operator_modes


class Sees(OperatorMode):
    joins = True

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self._name = name
        self._seen = seen

    def on_op(self, call: OpCall) -> Any:
        self._seen.append(f"{self._name}: {call.name}")
        return call.run()


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Looks(OperatorMode):
    def on_op(self, call: OpCall) -> Any:
        for tensor in call.tensors:
            tensor.sum()
        return call.run()


class OfAUser(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.neg(torch.ones(1))
        return func(*args, **(kwargs or {}))


class Doubles(OperatorMode):
    """Calls an operator of its own, which whoever is outside must see."""

    def on_op(self, call: OpCall) -> Any:
        return torch.ops.aten.mul.Scalar(call.run(), 2)


def test_the_innermost_sees_an_operator_first_and_all_see_it_once() -> None:
    seen: list[str] = []
    outer, inner = Sees("outer", seen), Sees("inner", seen)
    with outer, inner:
        assert torch._C._len_torch_dispatch_stack() == 1
        assert operator_modes() == [outer, inner]
        torch.ones(2)
    assert seen == ["inner: aten.ones.default", "outer: aten.ones.default"]
    assert torch._C._len_torch_dispatch_stack() == 0
    with outer:
        torch.ones(2)
    assert len(seen) == 3  # the inner one has left


def test_what_calls_operators_itself_stays_on_torchs_stack() -> None:
    seen: list[str] = []
    with Sees("outer", seen), Doubles(), Sees("inner", seen):
        assert torch._C._len_torch_dispatch_stack() == 3
        result = torch.ones(1).neg()
    assert result.item() == -4
    assert seen.count("outer: aten.mul.Scalar") == 2
    assert "inner: aten.mul.Scalar" not in seen


def test_function_modes_see_what_runs_other_python_and_nothing_of_these_modes() -> None:
    """In a backward pass, where autograd calls operators with function modes on."""

    def seen(below: AbstractContextManager[object]) -> list[str]:
        functions = Functions()
        x = torch.ones(2, requires_grad=True)
        arguments = (((x * 2).sum(),), (torch.tensor(1.0),), False, False, ())
        with below, Looks(), functions:
            _engine_run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)
        return functions.names

    assert "mul.Tensor" in seen(OfAUser())  # type: ignore[no-untyped-call]
    assert seen(nullcontext()) == []
