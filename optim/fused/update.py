"""The tensors of a fused step, and Adam as in-place tensor code: the reference, and the fallback.

Shapes: [...] any shape, the same for all tensors of one parameter or flat run; [] is a 0-D tensor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from graphfsdp.base.torch_internals import foreach_copy_
from graphfsdp.optim.fused.state import Flags


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


class AdamCoefficients(NamedTuple):
    """The scalars of one update, each a [] float64 tensor on the device."""

    decay: Tensor  # factor on the weight for decoupled decay
    weight_decay: Tensor
    one_minus_beta1: Tensor
    beta2: Tensor
    one_minus_beta2: Tensor
    step_size: Tensor  # lr over the bias correction of the first moment
    root_correction2: Tensor  # root of the bias correction of the second moment
    eps: Tensor


def adam_coefficients(
    hyper_row: Tensor,  # [5] float64, one group's row of the table, see HYPER_COLUMNS
    step: Tensor,  # [] float, updates done so far, this one included
    flags: Flags,
) -> AdamCoefficients:
    """In float64: ``1 - beta2`` and ``1 - beta2**step`` lose half of their digits in float32.

    Capture: no host sync; replays read the table and the step that they find.
    """
    lr, beta1, beta2, eps, weight_decay = hyper_row.unbind()
    one = torch.ones_like(lr)
    correction1 = one - beta1**step if flags.bias_correction else one
    correction2 = one - beta2**step if flags.bias_correction else one
    return AdamCoefficients(
        decay=one - lr * weight_decay,
        weight_decay=weight_decay,
        one_minus_beta1=one - beta1,
        beta2=beta2,
        one_minus_beta2=one - beta2,
        step_size=lr / correction1,
        root_correction2=correction2.sqrt(),
        eps=eps,
    )


@torch.no_grad()
def adam_update_(
    part: Columns,
    coefficients: AdamCoefficients,  # [] float64 each
    flags: Flags,
    *,
    grad_scale: Tensor | None = None,  # [] float, multiplies the gradients
    found_inf: Tensor | None = None,  # [] float, nothing is changed unless it is zero
) -> None:
    """Apply one step to some parameters, in place.

    The maths is in float32 whatever the storage is (in float64 for float64 weights). With main
    weights, the model weights are only written: they become the rounded main weights.

    Capture: no host sync; temporaries come from the graph's pool; all addresses stay fixed.
    Source: Kingma & Ba 2015, Algorithm 1 (arXiv:1412.6980); decoupled decay: Loshchilov & Hutter
        2019, Algorithm 2 (arXiv:1711.05101); the largest second moment: Reddi et al. 2018,
        Algorithm 2 (arXiv:1904.09237).
    """
    if found_inf is not None:
        written = part._replace(grads=[])
        with taken_back(found_inf, [tensor for column in written for tensor in column]):
            adam_update_(part, coefficients, flags, grad_scale=grad_scale)
        return
    wide = torch.promote_types(part.params[0].dtype, torch.float32)
    weights, firsts, seconds, largests = read_wide(part, wide)
    for index, weight in enumerate(weights):
        gradient = part.grads[index].to(wide)
        if grad_scale is not None:
            gradient = gradient * grad_scale
        if flags.maximize:
            gradient = -gradient
        _adam_rule_(
            weight,
            gradient,
            firsts[index],
            seconds[index],
            largests[index] if largests else None,
            coefficients,
            flags.adam_w_mode,
        )
    store_wide(part, weights, firsts, seconds, largests)


@contextmanager
def taken_back(
    found_inf: Tensor,  # [] float
    written: Sequence[Tensor],  # [...] each
) -> Iterator[None]:
    """Take back what the body writes, unless the flag is zero. Capture: no host sync."""
    kept = [tensor.clone() for tensor in written]
    yield
    skip = found_inf != 0
    for tensor, before in zip(written, kept, strict=True):
        tensor.copy_(torch.where(skip.to(tensor.device), before, tensor))


def _adam_rule_(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    largest: Tensor | None,
    coefficients: AdamCoefficients,
    adam_w_mode: bool,
) -> None:
    """The order of operations of torch's own Adam."""
    if adam_w_mode:
        weight.mul_(coefficients.decay)
    else:
        gradient = gradient + weight * coefficients.weight_decay
    first.add_((gradient - first) * coefficients.one_minus_beta1)
    second.mul_(coefficients.beta2).add_(gradient * gradient * coefficients.one_minus_beta2)
    denominator = _root(_keep_largest_(largest, second))
    denominator = denominator.div_(coefficients.root_correction2).add_(coefficients.eps)
    weight.sub_((first / denominator).mul_(coefficients.step_size))


def _keep_largest_(largest: Tensor | None, second: Tensor) -> Tensor:
    """Return the moment to divide by, after taking over what has grown."""
    return second if largest is None else torch.maximum(largest, second, out=largest)


def _root(value: Tensor) -> Tensor:
    """Return the correctly rounded root, which torch's float32 one on the CPU is not."""
    return value.double().sqrt().to(value.dtype)
