"""Calls an operator through torch's Python bindings where that is the same kernel for less.

``OpOverload._op`` builds a generic stack of arguments; the generated bindings parse theirs
directly, which saves 0.4 to 2 microseconds a call. Only overloads listed here are rewritten:
for these the binding, given the recorded arguments, picks the same overload.
"""

from collections.abc import Sequence

import torch

from graphfsdp._capture.cpu.out_calls import Constant

# Methods whose list of integers is spread: x.view(2, 3).
_SPREAD_METHODS = frozenset({"view.default", "permute.default"})

_METHODS = frozenset(
    {
        "t.default",
        "transpose.int",
        "unsqueeze.default",
        "squeeze.dim",
        "select.int",
        "expand.default",
        "copy_.default",
        "add_.Tensor",
        "mul_.Tensor",
        "mul_.Scalar",
        "div_.Tensor",
        "div_.Scalar",
        "zero_.default",
        "fill_.Scalar",
    }
)

_FUNCTIONS = frozenset(
    {
        "add.Tensor",
        "addmm.default",
        "bmm.default",
        "cat.default",
        "clone.default",
        "cos.default",
        "div.Tensor",
        "embedding.default",
        "exp.default",
        "log.default",
        "mm.default",
        "mul.Tensor",
        "native_layer_norm.default",
        "neg.default",
        "relu.default",
        "rsqrt.default",
        "sigmoid.default",
        "silu.default",
        "sin.default",
        "sqrt.default",
        "stack.default",
        "sub.Tensor",
        "sum.dim_IntList",
        "tanh.default",
    }
)


def direct_call(
    op: torch._ops.OpOverload, arguments: Sequence[str], spread: str | None, constant: Constant
) -> str | None:
    """Return Python source that calls an operator through its binding.

    Args:
        op: The operator.
        arguments: Source of its positional arguments; it must have no keyword arguments.
        spread: Source of its second argument without the brackets, if that is a list.
        constant: Gives an object a name in the program.

    Returns:
        The source; None if the operator has no listed binding.
    """
    if op.namespace != "aten":
        return None
    function = op._schema.name.removeprefix("aten::")
    name = f"{function}.{op._overloadname}"
    if name in _SPREAD_METHODS and spread:
        return f"{arguments[0]}.{function}({spread})"
    if name in _METHODS:
        return f"{arguments[0]}.{function}({', '.join(arguments[1:])})"
    if name in _FUNCTIONS and hasattr(torch._C._VariableFunctions, function):
        called = constant(getattr(torch._C._VariableFunctions, function), "f")
        return f"{called}({', '.join(arguments)})"
    return None
