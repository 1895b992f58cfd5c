"""The tensors of a fused step: flat memory, and weights and moments that have fewer bits.

Shapes: [...] any shape, the same for all tensors of one parameter or flat run.
"""

from collections.abc import Sequence
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
    main_param: Tensor | None = None  # [...] float32


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


def read_wide(part: Columns, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return what a step updates in a wide dtype: the stored tensors where they have it.

    These are weights, first, second and largest second moments; empty where are none.
    """
    found = []
    for tensors in (part.main_params or part.params, *_moments(part)):
        is_wide = not tensors or tensors[0].dtype == dtype
        found.append(tensors if is_wide else [tensor.to(dtype) for tensor in tensors])
    return found


def store_wide(part: Columns, weights: list[Tensor], *moments: list[Tensor]) -> None:
    """Store what ``read_wide`` has returned and a step has updated."""
    updated = (*moments, weights, weights)
    for stored, now in zip((*_moments(part), part.main_params, part.params), updated, strict=True):
        if stored and stored is not now:
            foreach_copy_(stored, now)


def _moments(part: Columns) -> tuple[list[Tensor], ...]:
    return part.exp_avgs, part.exp_avg_sqs, part.max_exp_avg_sqs


def same_layout(tensor: Tensor, other: Tensor) -> bool:
    """Equal positions in memory are equal indices; strides of dims of size one say nothing."""
    return tensor.shape == other.shape and all(
        a == b
        for a, b, size in zip(tensor.stride(), other.stride(), tensor.shape, strict=True)
        if size != 1 and tensor.numel()
    )


def flat_view(tensor: Tensor, numel: int | None = None) -> Tensor:
    """The 1-D view in memory order; a longer one reaches into neighbours in the same storage."""
    length = tensor.numel() if numel is None else numel
    return tensor.detach().as_strided((length,), (1,), tensor.storage_offset())


def joined(scalars: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return 1-D views of [] tensors, neighbours in one view, and each one's place in all views."""
    order = sorted(range(len(scalars)), key=lambda index: _place(scalars[index]))
    stretches: list[list[Tensor]] = []
    places = [0] * len(scalars)
    for place, index in enumerate(order):
        scalar = scalars[index]
        if stretches and _continues(stretches[-1][-1], scalar):
            stretches[-1].append(scalar)
        else:
            stretches.append([scalar])
        places[index] = place
    return [flat_view(stretch[0], len(stretch)) for stretch in stretches], places


def _continues(left: Tensor, right: Tensor) -> bool:
    """Tell whether a tensor starts where another one of its dtype ends, in the same storage."""
    address, offset = _place(left)
    follows = (address, offset + left.numel()) == _place(right)
    return follows and left.dtype == right.dtype


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
