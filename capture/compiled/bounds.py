"""How far what a compiled iteration computes may be from what eager PyTorch computes.

Note [The bound]: compiled kernels add in another order, keep float32 where eager mode rounds to 16
bits in between, and fuse multiply with add. Each of these is a rounding or two of an operator's own
size, and what an iteration does to them is to add them up along its longest chain of operators. So
a tensor may differ by ``BOUNDS[dtype]`` times the largest number among what belongs together: all
gradients, since one that is zero but for rounding has no digits of its own; all first moments; else
the tensor itself. The numbers are 2^8 roundings of float32 and float64, and 2^4 of 16 bits, whose
sums eager mode keeps in float32 too.

Integers, booleans, step counts and the state of generators must be equal.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

BOUNDS: Mapping[torch.dtype, float] = MappingProxyType(
    {
        torch.float64: 2.0**-45,
        torch.float32: 2.0**-16,
        torch.float16: 2.0**-7,
        torch.bfloat16: 2.0**-4,
    }
)


def is_compared_by_bound(dtype: torch.dtype) -> bool:
    return dtype in BOUNDS


def largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    if not tensor.numel():
        return 0.0
    finite = tensor.abs().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.max())


def beyond(
    expected: Tensor,  # [...]
    got: Tensor,  # [...]
    scale: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return [...] bool: which elements differ by more than the bound times ``scale``.

    ``dtype``: the coarsest that had a part in them, if it is not their own. NaN equals NaN, and
    an infinity itself.
    """
    if not is_compared_by_bound(expected.dtype):
        return expected != got
    allowed = BOUNDS[dtype or expected.dtype] * scale
    left, right = expected.double(), got.double()
    same = (left == right) | (left.isnan() & right.isnan())
    return ~(same | ((left - right).abs() <= allowed))


def coarsest(dtypes: "set[torch.dtype]") -> torch.dtype | None:
    """Return that of the widest bound, None if none of them has one."""
    known = [dtype for dtype in dtypes if dtype in BOUNDS]
    return max(known, key=lambda dtype: BOUNDS[dtype], default=None)
