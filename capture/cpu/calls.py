"""How a program calls an operator: for its result, or into memory that is already there.

Into memory that is there go what trace/landing.py lists, and operators that are plain fills and
copies. Every result is bit for bit what the operator would have returned.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from graphfsdp._capture.trace.landing import COPIES, WITH_OUT, out_overload, short_name
from graphfsdp.base.op_tensors import is_empty
from graphfsdp.base.torch_internals import (
    OpOverload,
    binding_of,
    num_dispatch_modes,
    profiler_is_on,
    schema_of,
)

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
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_ONES = frozenset({"ones", "ones_like", "new_ones"})
_FULL = MappingProxyType({"full": 1, "full_like": 1, "new_full": 2})  # position of the number
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

_OTHER_FORMS = _ZEROS | _ONES | COPIES | _FULL.keys() | _RENAMED.keys()

Constant = Callable[[object, str], str]  # gives an object a name in the program


def call(
    op: OpOverload,
    args: Sequence[str],
    kwargs: Mapping[str, str],
    constant: Constant,
    known: Callable[[], list[Any]],
) -> str:
    """Return Python source that calls an operator for its results.

    Arguments come as source, too; ``constant`` gives an object a name in the program. ``known``
    gives the arguments that are the same objects in each replay, and ``...`` for the others.
    """
    name = short_name(op)
    function = schema_of(op).name.removeprefix("aten::")
    if name in _METHODS and not kwargs:
        return f"{args[0]}.{function}({', '.join(args[1:])})"
    kernel = op.py_kernels.get(torch.DispatchKey.CPU)
    called = binding_of(op)
    if kernel is not None:
        # Ours can be told ahead what stays.
        prepared = kernel.prepared(*known()) if hasattr(kernel, "prepared") and not kwargs else None
        called = _unless_watched(prepared or kernel, binding_of(op))
    if name in _BINDINGS and not kwargs:
        called = getattr(torch._C._VariableFunctions, function)
    named = [f"{key}={value}" for key, value in kwargs.items()]
    return f"{constant(called, 'f')}({', '.join([*args, *named])})"


def _unless_watched(kernel: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    """Call a kernel in Python by itself, or its operator where a mode or a profiler sees those."""

    def call(*args: Any) -> Any:
        if num_dispatch_modes() or profiler_is_on():
            return operator(*args)
        return kernel(*args)

    return call


def can_write_into(op: OpOverload) -> bool:
    name = short_name(op)
    if name in WITH_OUT:
        return out_overload(op) is not None
    return name in _OTHER_FORMS or is_empty(op)


def call_into(
    op: OpOverload,
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
    if name in COPIES:
        return f"{out}.copy_({args[0]})"
    further: tuple[str, ...] = ()
    if name in _RENAMED or name in _BINDINGS:
        function, further = _RENAMED.get(name, (schema_of(op).name.removeprefix("aten::"), ()))
        called, places = getattr(torch._C._VariableFunctions, function), ["out"]
    else:
        overload = out_overload(op)
        assert overload is not None
        called = binding_of(overload)
        places = [argument.name for argument in schema_of(overload).arguments if argument.is_out]
    named = [f"{key}={value}" for key, value in kwargs.items()]
    named += [f"{key}={value}" for key, value in zip(places, outs, strict=True)]
    return f"{constant(called, 'f')}({', '.join([*args, *further, *named])})"
