"""How a program calls an operator: for its result, or into memory that is already there.

torch generates an ``out=`` variant for nearly every operator, but most of these compute and then
copy. Listed here are the ones whose kernel writes into the given tensor (structured kernels, and
some hand-written ones), and operators that are plain fills and copies. Every result is bit for
bit what the operator would have returned: same kernel, same strides.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

_POINTWISE = (
    *("abs", "acos", "acosh", "add.Tensor", "addcdiv", "addcmul", "angle", "asin", "asinh", "atan"),
    *("atan2", "atanh", "ceil", "bitwise_and.Tensor", "bitwise_not", "bitwise_or.Tensor"),
    *("bitwise_xor.Tensor", "clamp", "clamp.Tensor", "clamp_max", "clamp_max.Tensor", "clamp_min"),
    *("clamp_min.Tensor", "complex", "copysign.Tensor", "cos", "cosh", "digamma", "div.Tensor"),
    *("div.Tensor_mode", "elu", "elu_backward", "eq.Scalar", "eq.Tensor", "erf", "erfc", "erfinv"),
    *("exp", "exp2", "expm1", "floor", "fmax", "fmin", "fmod.Tensor", "frac", "ge.Scalar"),
    *("ge.Tensor", "gelu", "gelu_backward", "glu", "gt.Scalar", "gt.Tensor", "hardsigmoid"),
    *("hardsigmoid_backward", "hardtanh_backward", "hypot", "le.Scalar", "le.Tensor", "leaky_relu"),
    *("leaky_relu_backward", "lerp.Scalar", "lerp.Tensor", "lgamma", "log", "log10", "log1p"),
    *("log2", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "lt.Scalar"),
    *("lt.Tensor", "maximum", "minimum", "mish", "mul.Tensor", "nan_to_num", "ne.Scalar"),
    *("ne.Tensor", "neg", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal"),
    *("remainder.Tensor", "round", "rsqrt", "sgn", "sigmoid", "sigmoid_backward", "sign", "silu"),
    *("silu_backward", "sin", "sinc", "sinh", "softplus", "softplus_backward", "sqrt"),
    *("sub.Tensor", "tan", "tanh", "tanh_backward", "threshold", "threshold_backward", "trunc"),
    *("where.self", "xlogy.Tensor"),
)
_OTHERS = (
    *("_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "addbmm"),
    *("addmm", "addmv", "all.dim", "amax", "amin", "any.dim", "argmax", "argmin", "avg_pool2d"),
    *("avg_pool2d_backward", "baddbmm", "bmm", "cat", "cumprod", "cumsum", "gather"),
    *("index.Tensor", "index_add", "index_copy", "index_select", "linalg_vector_norm", "max.dim"),
    *("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "mean.dim", "min.dim", "mm"),
    # Not mse_loss: its out= form resizes the result to the shape of the inputs for a while.
    *("mse_loss_backward", "nll_loss2d_backward"),
    *("nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward", "prod.dim_int", "scatter.src"),
    *("scatter.value", "scatter_add", "sum.dim_IntList", "topk", "tril", "triu"),
    *("upsample_bilinear2d", "upsample_bilinear2d_backward", "upsample_nearest2d"),
    *("upsample_nearest2d_backward",),
)
_WITH_OUT = frozenset((*_POINTWISE, *_OTHERS))
# Their Python binding picks the same overload, given the recorded arguments (and out=), and parses
# them faster than an OpOverload does: 0.4 to 2 microseconds a call.
_BINDINGS = frozenset(
    {
        *("abs", "add.Tensor", "addcdiv", "addcmul", "addmm", "amax", "amin", "baddbmm", "bmm"),
        *("cat", "clamp", "clamp_min", "cos", "div.Tensor", "embedding", "eq.Tensor", "exp"),
        *("gather", "index_select", "log", "log1p", "maximum", "mean.dim", "minimum", "mm"),
        *("mul.Tensor", "native_layer_norm", "ne.Tensor", "neg", "reciprocal", "rsqrt", "sigmoid"),
        *("sin", "sqrt", "sub.Tensor", "sum.dim_IntList", "tanh", "where.self"),
    }
)
_METHODS = frozenset(
    {
        *("add_.Tensor", "copy_", "div_.Scalar", "div_.Tensor", "expand", "fill_.Scalar"),
        *("mul_.Scalar", "mul_.Tensor", "permute", "select.int", "squeeze.dim", "t"),
        *("transpose.int", "unsqueeze", "view", "zero_"),
    }
)
_EMPTY = frozenset(
    {
        *("empty.memory_format", "empty_like", "empty_permuted", "empty_strided", "new_empty"),
        *("new_empty_strided",),
    }
)
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_ONES = frozenset({"ones", "ones_like", "new_ones"})
_FULL = MappingProxyType({"full": 1, "full_like": 1, "new_full": 2})  # position of the number
_COPIES = frozenset({"clone", "_to_copy"})
# They call this other function of torch, with these further arguments.
_RENAMED: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "relu": ("clamp_min", ("0",)),
        "mul.Scalar": ("mul", ()),
        "add.Scalar": ("add", ()),
        "sub.Scalar": ("sub", ()),
        "div.Scalar": ("div", ()),
        "stack": ("stack", ()),
    }
)

_OTHER_FORMS = _EMPTY | _ZEROS | _ONES | _COPIES | _FULL.keys() | _RENAMED.keys()

Constant = Callable[[object, str], str]  # gives an object a name in the program


def short_name(op: torch._ops.OpOverload) -> str:
    """Return "mm" for aten::mm, "add.Tensor" for aten::add.Tensor; "" outside of aten."""
    if op.namespace != "aten":
        return ""
    name: str = op._schema.name.removeprefix("aten::")
    return f"{name}.{op._schema.overload_name}" if op._schema.overload_name else name


def call(
    op: torch._ops.OpOverload,
    args: Sequence[str],
    kwargs: Mapping[str, str],
    constant: Constant,
) -> str:
    """Return Python source that calls an operator for its results.

    Arguments come as source, too; ``constant`` gives an object a name in the program.
    """
    name = short_name(op)
    function = op._schema.name.removeprefix("aten::")
    if name in _METHODS and not kwargs:
        return f"{args[0]}.{function}({', '.join(args[1:])})"
    direct = name in _BINDINGS and not kwargs
    called = getattr(torch._C._VariableFunctions, function) if direct else op._op
    named = [f"{key}={value}" for key, value in kwargs.items()]
    return f"{constant(called, 'f')}({', '.join([*args, *named])})"


def can_write_into(op: torch._ops.OpOverload) -> bool:
    name = short_name(op)
    if name in _WITH_OUT:
        return _out_overload(op) is not None
    return name in _OTHER_FORMS


def call_into(
    op: torch._ops.OpOverload,
    args: Sequence[str],
    kwargs: Mapping[str, str],
    outs: Sequence[str],
    constant: Constant,
) -> str:
    """Return Python source that computes an operator's results into existing tensors.

    Only where ``can_write_into`` holds, and not for an operator that only makes memory. What
    ``outs`` names has the geometry that the operator would have made.
    """
    name = short_name(op)
    out = outs[0]
    if name in _ZEROS:
        return f"{out}.zero_()"
    if name in _ONES:
        return f"{out}.fill_(1)"
    if name in _FULL:
        return f"{out}.fill_({args[_FULL[name]]})"
    if name in _COPIES:
        return f"{out}.copy_({args[0]})"
    further: tuple[str, ...] = ()
    if name in _RENAMED or name in _BINDINGS:
        function, further = _RENAMED.get(name, (op._schema.name.removeprefix("aten::"), ()))
        called, places = getattr(torch._C._VariableFunctions, function), ["out"]
    else:
        overload = _out_overload(op)
        assert overload is not None
        called = overload._op
        places = [argument.name for argument in overload._schema.arguments if argument.is_out]
    named = [f"{key}={value}" for key, value in kwargs.items()]
    named += [f"{key}={value}" for key, value in zip(places, outs, strict=True)]
    return f"{constant(called, 'f')}({', '.join([*args, *further, *named])})"


def _out_overload(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload that takes the results as arguments, if a CPU kernel stands behind it.

    What torch generates (compute, then copy) is registered for all devices at once instead.
    """
    packet = op._overloadpacket
    wanted = [_form(argument) for argument in op._schema.arguments]
    for overload_name in packet.overloads():
        overload: torch._ops.OpOverload = getattr(packet, overload_name)
        arguments = overload._schema.arguments
        given = [_form(argument) for argument in arguments if not argument.is_out]
        num_outs = len(arguments) - len(given)
        if num_outs and num_outs == len(op._schema.returns) and given == wanted:
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
            return overload if has_kernel(overload.name(), "CPU") else None
    return None


def _form(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)
