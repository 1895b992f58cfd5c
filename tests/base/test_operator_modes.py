"""Modes that look on at operators: they join one another, and each sees every operator once."""

from typing import Any

import pytest
import torch

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


def test_an_exception_leaves_no_mode_behind() -> None:
    seen: list[str] = []
    with pytest.raises(RuntimeError), Sees("outer", seen), Sees("inner", seen):
        torch.ones(2) @ torch.ones(3)
    assert torch._C._len_torch_dispatch_stack() == 0
    torch.ones(2)
    assert [name for name in seen if "ones" in name] == [
        *("inner: aten.ones.default", "outer: aten.ones.default") * 2
    ]
