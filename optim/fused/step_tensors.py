"""The tensors that one fused step touches, of one parameter or as columns of many.

Shapes: [...] any shape, the same for all tensors of one parameter or flat run; [S, C] float32
scales, see ``scaled_moments``.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class StepTensors(NamedTuple):
    """One parameter's tensors, or one flat run's.

    Attributes:
        param: [...] float, model weight, written.
        grad: [...] any float, read only.
        exp_avg: [...] float, first moment or momentum buffer, updated in place.
        exp_avg_sq: [...] float, second moment, updated in place.
        max_exp_avg_sq: [...] float, its largest so far, updated in place.
        main_param: [...] float32 or int16 remainders, updated in place.
        exp_avg_scale: [S, C] float32, updated in place; None where a moment has no scales.
        exp_avg_sq_scale: The same for the second moment.
        max_exp_avg_sq_scale: The same for its largest.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    max_exp_avg_sq: Tensor | None = None
    main_param: Tensor | None = None
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None
    max_exp_avg_sq_scale: Tensor | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether a moment has scales."""
        return self.exp_avg_scale is not None or self.exp_avg_sq_scale is not None


class Columns(NamedTuple):
    """The tensors of many parameters, one list per field of ``StepTensors``.

    A list is empty where the parameters have no such tensor.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    main_params: list[Tensor]
    exp_avg_scales: list[Tensor]
    exp_avg_sq_scales: list[Tensor]
    max_exp_avg_sq_scales: list[Tensor]

    def member(self, index: int) -> StepTensors:
        """Return one parameter's tensors."""
        return StepTensors(*(column[index] if column else None for column in self))  # type: ignore[arg-type]

    def part(self, start: int, stop: int) -> "Columns":
        """Return the columns of the parameters from ``start`` up to ``stop``."""
        return Columns(*(column[start:stop] for column in self))

    def dtypes(self) -> "Dtypes":
        """Return the storage dtypes, which are the same for all parameters."""
        return Dtypes(*(column[0].dtype if column else None for column in self[:6]))  # type: ignore[arg-type]


class Dtypes(NamedTuple):
    """Storage dtypes of one launch; None where there is no such tensor.

    A ``main_param`` of int16 holds remainders, see ``remainders``. Moments of float16 and
    float8_e4m3fn have scales.
    """

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype | None
    exp_avg_sq: torch.dtype | None
    max_exp_avg_sq: torch.dtype | None
    main_param: torch.dtype | None


def make_columns(members: list[StepTensors]) -> Columns:
    """Return the tensors of many parameters by kind."""
    columns = zip(*members, strict=True) if members else [()] * len(Columns._fields)
    return Columns(*([tensor for tensor in column if tensor is not None] for column in columns))
