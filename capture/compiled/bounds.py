"""How far what a compiled iteration computes may be from what eager PyTorch computes.

Note [The bound]: compiled kernels add in another order, keep float32 where eager mode rounds to 16
bits in between, and fuse multiply with add. Each of these is a rounding or two of an operator's own
size, and what an iteration does to them is to add them up along its longest chain of operators. So
a tensor may differ by ``BOUNDS[dtype]`` times the largest number among what belongs together, since
one that is zero but for rounding (a loss that is a difference, a mean of what is centred) has no
digits of its own: all gradients; these and all results; all first moments; what lies in one module
beside its parameters. The numbers are 2^8 roundings of float32 and float64, and 2^4 of 16 bits,
whose sums eager mode keeps in float32 too.

Integers, booleans, step counts and the state of generators must be equal.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

BOUNDS: Mapping[torch.dtype, float] = MappingProxyType(
    {
        torch.float64: 2.0**-45,
        torch.float32: 2.0**-16,
        torch.float16: 2.0**-7,
        torch.bfloat16: 2.0**-4,
        torch.float8_e4m3fn: 2.0**-2,
        torch.complex128: 2.0**-45,
        torch.complex64: 2.0**-16,
    }
)

_MAIN = "master_param"
_CHUNK = 1 << 13


def largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    finite = (wide(part).abs().nan_to_num(0.0, 0.0, 0.0) for part in chunks(tensor))
    return max((float(part.max()) for part in finite if part.numel()), default=0.0)


def chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor in parts, which take little memory as float64, a few times over."""
    parts: tuple[Tensor, ...] = tensor.reshape(-1).split(_CHUNK)
    return parts


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def beyond(
    expected: Tensor,  # [...]
    got: Tensor,  # [...]
    allowed: float,
) -> Tensor:
    """Return [...] bool: which elements differ by more, any integer; NaN equals NaN."""
    if not is_rounded(expected):
        return (expected != got) & math.isfinite(allowed)
    left, right = wide(expected), wide(got)
    same = (left == right) | (left.isnan() & right.isnan())
    return ~(same | ((left - right).abs() <= allowed))


def bound_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the widest bound of some dtypes, 0 if none of them has one."""
    return max((BOUNDS.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def allowances(
    expected: Mapping[str, Tensor], before: Mapping[str, Tensor], bound: float
) -> dict[str, float]:
    """Return how far each tensor of a verification may be from another run's; see Note [The bound].

    Weights may differ by two steps more: where a gradient is nothing but rounding, Adam makes a
    whole step of it, in either direction; and eager's own may be almost none, so the largest of
    the iteration counts. ``before`` has weights as they were before it.
    """
    scales: dict[str, float] = {}
    for name, tensor in expected.items():
        if is_rounded(tensor):
            kind = _kind(name)
            scales[kind] = max(scales.get(kind, 0.0), largest(tensor))
    scales["result"] = max(scales.get("result", 0.0), scales.get("the gradient", 0.0))
    steps = [
        largest(wide(expected[name]) - wide(old))
        for name, old in before.items()
        if name in expected
    ]
    step = max(steps, default=0.0)
    allowed = {}
    for name, tensor in expected.items():
        if is_rounded(tensor):
            allowed[name] = max(bound, bound_of([tensor.dtype])) * scales[_kind(name)]
            if name in before:
                allowed[name] += 2 * step
    return allowed


def is_weight(name: str) -> bool:
    """Tell whether a tensor of a verification is one that an optimizer steps."""
    return name.startswith("parameter ") or _MAIN in name


def _kind(name: str) -> str:
    """Return what tensors have in common that are on one scale; see Note [The bound]."""
    if name.startswith(("buffer ", "attribute ")):
        return name.rpartition(".")[0]  # with the module's path
    return "result" if name.startswith("result ") else name.partition(" of ")[0]
