"""Tensors on the meta device: how they get memory, and how values that nobody has set are seen."""

import torch
from torch import Tensor, nn

from graphfsdp.errors import ConfigError


def become(tensor: Tensor, other: Tensor, name: str) -> None:
    """Become another tensor for all who hold this one; its own attributes stay.

    ConfigError: somebody holds it weakly, or in a graph of autograd.
    """
    attributes = dict(vars(tensor))
    try:
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        raise ConfigError(
            f"{name!r} cannot be moved from the meta device to memory: {error}. Remedy: make "
            "what holds it (an optimizer, a hook) after graphfsdp.materialize"
        ) from error
    vars(tensor).update(attributes)


def move(tensor: Tensor, device: torch.device | str, name: str) -> None:
    """Move a tensor to another device, for all who hold it; what was on meta holds marks."""
    if tensor.is_meta:
        new = torch.empty_like(tensor.detach(), device=device)
        mark_unset_(new)
    else:
        new = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, tensor.requires_grad)
    become(tensor, new, name)


def mark_unset_(tensor: Tensor) -> None:
    """Fill a tensor with what no initialisation leaves behind, where its dtype has that."""
    mark = _mark_of(tensor.dtype)
    if mark is not None:
        tensor.fill_(mark)


def is_partly_unset(tensor: Tensor) -> bool:
    """Whether a marked tensor still holds marks; a host sync."""
    mark = _mark_of(tensor.dtype)
    if mark is None or not tensor.numel():
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        # The sum takes no memory; it alone may be NaN without an element that is.
        return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
    return bool((tensor == mark).any())


def _mark_of(dtype: torch.dtype) -> float | int | None:
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        return float("nan")
    if dtype.is_floating_point or dtype is torch.bool or not dtype.is_signed:
        return None
    return torch.iinfo(dtype).min
