"""The gradient norm, the clip coefficient and the skip flag that FusedAdam's step reads."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphfsdp.base.dtensors import RankGroups, sharding_groups
from graphfsdp.base.norms import global_norm, reduce_parts

_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm


class NormParts(NamedTuple):
    """Gradients by the ranks that share them.

    Attributes:
        whole: [...] each, the same on every rank.
        sharded: [...] each, this rank's part, by the groups that hold the others.
    """

    whole: list[Tensor]
    sharded: dict[RankGroups, list[Tensor]]


def norm_parts(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> NormParts:
    """Sort gradients by the groups that their parameter is sharded over.

    They are there also where this rank holds no gradient of them: every rank must take part.

    Args:
        params: All parameters of the optimizer.
        grads: This rank's part of the gradient of each, or None.
    """
    parts = NormParts([], {})
    for param, grad in zip(params, grads, strict=True):
        groups = sharding_groups(param)
        found = parts.sharded.setdefault(groups, []) if groups else parts.whole
        if grad is not None and grad.numel():
            found.append(grad)
    return parts


def grad_norm(parts: NormParts, device: torch.device, norm_type: float) -> Tensor:
    """Return [] float32, the norm over all elements of all gradients on all ranks.

    Args:
        parts: The gradients.
        device: Where the result lies.
        norm_type: 2 or infinity.

    Capture: no host sync; one collective for each group of ranks.
    """
    if norm_type == 2:
        return global_norm(parts.whole, parts.sharded, device)
    # Not every backend's maximum keeps a NaN.
    found = {(): _largest(parts.whole, device)} | {
        groups: _largest(tensors, device).nan_to_num(nan=math.inf)
        for groups, tensors in parts.sharded.items()
    }
    return reduce_parts(found, torch.maximum, reduction="max")


def _largest(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(tensors, math.inf)
    return torch.stack([norm.float() for norm in norms]).max()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return [] float32, what brings gradients of that norm down to ``max_norm``, at most one.

    Args:
        norm: [] float32.
        max_norm: The limit, positive.

    Capture: no host sync.
    Source: torch.nn.utils.clip_grad_norm_.
    """
    return (max_norm / (norm + _EPS)).clamp(max=1.0)
