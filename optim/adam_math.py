"""Adam's update rule as in-place tensor code: the reference, and the fallback where no kernel fits.

Shapes: [...] any shape, the same for all tensors of one parameter; [] is a 0-D tensor.
"""

from typing import NamedTuple

import torch
from torch import Tensor

HYPER_COLUMNS = ("lr", "beta1", "beta2", "eps", "weight_decay")


class AdamCoefficients(NamedTuple):
    """The scalars of one update, each a [] float64 tensor on the device.

    Attributes:
        decay: Factor on the weight for decoupled decay, ``1 - lr * weight_decay``.
        weight_decay: Share of the weight that L2 mode adds to the gradient.
        one_minus_beta1: Weight of the new gradient in the first moment.
        beta2: Weight of the old second moment.
        one_minus_beta2: Weight of the new squared gradient in the second moment.
        step_size: ``lr`` over the bias correction of the first moment.
        root_correction2: Square root of the bias correction of the second moment.
        eps: Added to the root of the corrected second moment.
    """

    decay: Tensor
    weight_decay: Tensor
    one_minus_beta1: Tensor
    beta2: Tensor
    one_minus_beta2: Tensor
    step_size: Tensor
    root_correction2: Tensor
    eps: Tensor


def adam_coefficients(
    hyper_row: Tensor,  # [5] float64, one group's row of the table, see HYPER_COLUMNS
    step: Tensor,  # [] float, updates done so far, this one included
    *,
    bias_correction: bool,
) -> AdamCoefficients:
    """Compute the scalars of one update on the device, in float64.

    float64 because ``1 - beta2`` and ``1 - beta2**step`` lose half of their digits in float32.

    Args:
        bias_correction: Correct both moments for their start at zero.

    Returns:
        Eight [] tensors.

    Capture: no host sync; replays read the table and the step that they find.
    """
    lr, beta1, beta2, eps, weight_decay = hyper_row.unbind()
    one = torch.ones_like(lr)
    correction1 = one - beta1**step if bias_correction else one
    correction2 = one - beta2**step if bias_correction else one
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
    param: Tensor,  # [...] float, model weight, written
    grad: Tensor,  # [...] any float, read only
    exp_avg: Tensor,  # [...] float, first moment, updated in place
    exp_avg_sq: Tensor,  # [...] float, second moment, updated in place
    coefficients: AdamCoefficients,  # [] float64 each
    *,
    main_param: Tensor | None = None,  # [...] float, main weight, updated in place
    grad_scale: Tensor | None = None,  # [] float, multiplies the gradient
    adam_w_mode: bool,
) -> None:
    """Apply one Adam step to one parameter, in place.

    The maths is in float32 whatever the storage is (in float64 for a float64 weight). With a main
    weight, the model weight is only written: it becomes the rounded main weight.

    Args:
        adam_w_mode: Decoupled weight decay; otherwise decay is added to the gradient.

    Capture: no host sync; temporaries come from the graph's pool; all addresses stay fixed.
    Source: Kingma & Ba 2015, Algorithm 1 (arXiv:1412.6980); decoupled decay: Loshchilov & Hutter
        2019, Algorithm 2 (arXiv:1711.05101).
    """
    weight_store = param if main_param is None else main_param
    wide = torch.promote_types(weight_store.dtype, torch.float32)
    weight = weight_store.to(wide)  # the tensor itself where it is wide already
    first, second = exp_avg.to(wide), exp_avg_sq.to(wide)
    gradient = grad.to(wide)
    if grad_scale is not None:
        gradient = gradient * grad_scale
    if adam_w_mode:
        weight.mul_(coefficients.decay)
    else:
        gradient = gradient + weight * coefficients.weight_decay
    first.add_((gradient - first) * coefficients.one_minus_beta1)
    second.mul_(coefficients.beta2).add_(gradient * gradient * coefficients.one_minus_beta2)
    denominator = second.sqrt().div_(coefficients.root_correction2).add_(coefficients.eps)
    weight.sub_((first / denominator).mul_(coefficients.step_size))
    for store, value in ((weight_store, weight), (exp_avg, first), (exp_avg_sq, second)):
        if store is not value:
            store.copy_(value)
    if main_param is not None:
        param.copy_(weight)


__all__ = ["HYPER_COLUMNS", "AdamCoefficients", "adam_coefficients", "adam_update_"]
