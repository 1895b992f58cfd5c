"""Which operators can compute into memory that is already there.

torch generates an ``out=`` variant for nearly every operator, but most of these compute and then
copy. Listed here are the ones whose kernel writes into the given tensor (structured kernels, and
some hand-written ones). Every result is bit for bit what the operator would have returned: same
kernel, same strides.
"""

import functools
from typing import Any

from graphfsdp.base.torch_internals import OpOverload, has_kernel, schema_of

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
WITH_OUT = frozenset((*_POINTWISE, *_OTHERS))
# Plain copies: their result is the argument, in another place and maybe in another dtype.
COPIES = frozenset({"clone", "_to_copy"})


@functools.cache
def short_name(op: OpOverload) -> str:
    """Return "mm" for aten::mm, "add.Tensor" for aten::add.Tensor; "" outside of aten."""
    if op.namespace != "aten":
        return ""
    name: str = schema_of(op).name.removeprefix("aten::")
    return f"{name}.{schema_of(op).overload_name}" if schema_of(op).overload_name else name


@functools.cache
def out_overload(op: OpOverload, device_type: str = "cpu") -> OpOverload | None:
    """Return the overload that takes the results as arguments, if such a device has a kernel.

    What torch generates (compute, then copy) is registered for all devices at once instead.
    """
    packet = op._overloadpacket
    wanted = [_form(argument) for argument in schema_of(op).arguments]
    for overload_name in packet.overloads():
        overload: OpOverload = getattr(packet, overload_name)
        arguments = schema_of(overload).arguments
        given = [_form(argument) for argument in arguments if not argument.is_out]
        num_outs = len(arguments) - len(given)
        if num_outs and num_outs == len(schema_of(op).returns) and given == wanted:
            return overload if has_kernel(overload.name(), device_type.upper()) else None
    return None


def _form(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)
