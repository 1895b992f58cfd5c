"""A float32 main weight in 32 bits: the bfloat16 model weight and an int16 remainder.

Shapes: [...] any shape.
"""

import torch
from torch import Tensor

# Note [Remainders]
# The float32's bits, read as an int32, are param_bits * 65536 + remainder, with the remainder in
# [-32768, 32767]: the model weight is the float32 rounded to the nearest bfloat16, halves away
# from zero. So the pair is exact, and the model weight alone is a rounded weight, no cut one.


def join_remainder(
    param: Tensor,  # [...] bfloat16
    remainder: Tensor,  # [...] int16
) -> Tensor:
    """Return the float32 main weight, [...] float32, newly allocated.

    Capture: no host sync.
    """
    bits = param.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainder).view(torch.float32)


def split_remainder_(
    param: Tensor,  # [...] bfloat16, written
    remainder: Tensor,  # [...] int16, written
    main: Tensor,  # [...] float32
) -> None:
    """Store a float32 main weight; see Note [Remainders].

    Capture: no host sync.
    """
    bits = main.view(torch.int32)
    # The low half as a signed number, then the rest, which is a multiple of 65536.
    low = bits.to(torch.int16)
    high = bits.sub(low).bitwise_right_shift_(16)
    param.view(torch.int16).copy_(high)
    remainder.copy_(low)
