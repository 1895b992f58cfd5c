"""The tensors of a fused step, and how weights and moments are stored in fewer bits.

Shapes: [...] any shape, the same for all tensors of one parameter or flat run.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from graphfsdp.base.torch_internals import foreach_copy_


class StepTensors(NamedTuple):
    """One parameter's tensors, or one flat run's; all but the gradient are written in place."""

    param: Tensor  # [...] float, model weight
    grad: Tensor  # [...] any float
    exp_avg: Tensor  # [...] float
    exp_avg_sq: Tensor  # [...] float
    max_exp_avg_sq: Tensor | None = None  # [...] float
    main_param: Tensor | None = None  # [...] float32, or int16 remainders


class Columns(NamedTuple):
    """The tensors of many parameters, one list per field of ``StepTensors``; empty for None."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    main_params: list[Tensor]

    def part(self, start: int, stop: int) -> "Columns":
        return Columns(*(column[start:stop] for column in self))

    def dtypes(self) -> "Dtypes":
        return Dtypes(*(column[0].dtype if column else None for column in self))  # type: ignore[arg-type]


class Dtypes(NamedTuple):
    """Storage dtypes of one launch; None where there is no such tensor."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    max_exp_avg_sq: torch.dtype | None
    main_param: torch.dtype | None


def make_columns(members: list[StepTensors]) -> Columns:
    columns = zip(*members, strict=True) if members else [()] * len(Columns._fields)
    return Columns(*([tensor for tensor in column if tensor is not None] for column in columns))


# Note [Remainders]
# A float32 main weight in 32 bits: its bits, read as an int32, are param_bits * 65536 + remainder,
# with the remainder in [-32768, 32767]: the bfloat16 model weight is the float32 rounded to the
# nearest, halves away from zero. So the pair is exact, and the model weight alone is a rounded
# weight, no cut one.


def join_remainder(
    param: Tensor,  # [...] bfloat16
    remainder: Tensor,  # [...] int16
) -> Tensor:
    """Return the float32 main weight, [...] float32, newly allocated."""
    bits = param.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainder).view(torch.float32)


def split_remainder_(
    param: Tensor,  # [...] bfloat16, written
    remainder: Tensor,  # [...] int16, written
    main: Tensor,  # [...] float32
) -> None:
    """Store a float32 main weight; see Note [Remainders]."""
    bits = main.view(torch.int32)
    # The low half as a signed number, then the rest, which is a multiple of 65536.
    low = bits.to(torch.int16)
    high = bits.sub(low).bitwise_right_shift_(16)
    param.view(torch.int16).copy_(high)
    remainder.copy_(low)


def read_weights(part: Columns, dtype: torch.dtype) -> list[Tensor]:
    """Return what a step updates, in a wide dtype: the stored tensors where they have it."""
    if part.main_params and part.main_params[0].dtype == torch.int16:
        return list(map(join_remainder, part.params, part.main_params))
    return _widen(part.main_params or part.params, dtype)


def store_weights(part: Columns, weights: list[Tensor]) -> None:
    if part.main_params and part.main_params[0].dtype == torch.int16:
        for param, remainder, weight in zip(part.params, part.main_params, weights, strict=True):
            split_remainder_(param, remainder, weight)
        return
    for stored in (part.main_params, part.params):
        if stored and stored is not weights:
            foreach_copy_(stored, weights)


def read_moments(part: Columns, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return first, second and largest second moments, in a wide dtype; empty where are none."""
    return [_widen(stored, dtype) for stored in _stored_moments(part)]


def store_moments(part: Columns, moments: list[list[Tensor]]) -> None:
    for stored, moment in zip(_stored_moments(part), moments, strict=True):
        if stored and stored is not moment:
            foreach_copy_(stored, moment)


def _stored_moments(part: Columns) -> tuple[list[Tensor], ...]:
    return part.exp_avgs, part.exp_avg_sqs, part.max_exp_avg_sqs


def _widen(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if not tensors or tensors[0].dtype == dtype:
        return tensors
    return [tensor.to(dtype) for tensor in tensors]
