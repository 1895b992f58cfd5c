"""Gradient clipping for sharded and whole parameters alike, with one collective per group."""

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import RankGroups, local_part, sharding_groups
from graphfsdp.base.norms import clip_coefficient, global_norm
from graphfsdp.base.sharded import MainGrad, sharded_roots
from graphfsdp.errors import ConfigError


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of a model in place so that their global norm is at most ``max_norm``.

    For loops without ``graphfsdp.capture``, which has ``max_grad_norm``. Every rank must call it,
    also one that holds no gradient.

    Args:
        model: Its parameters may be whole, or sharded by ``fully_shard``.
        max_norm: The limit, positive.

    Returns:
        [] float32, the norm before clipping, equal on every rank.

    Raises:
        ConfigError: ``max_norm`` is not positive, or ``model`` is no module.

    Capture: no host sync; one collective for each group of ranks that shares gradients.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, got {type(model).__name__}. Remedy: "
            "clip_grad_norm_(model, max_norm): the module knows which gradients are sharded"
        )
    if not max_norm > 0:
        raise ConfigError(f"max_norm must be a positive number, got {max_norm!r}")
    whole, sharded = _gradients(model)
    norm = global_norm(whole, sharded, next(model.parameters()).device)
    scale = clip_coefficient(norm, max_norm)
    gradients = [*whole, *(tensor for tensors in sharded.values() for tensor in tensors)]
    if gradients:
        torch._foreach_mul_(gradients, scale)
    return norm


def _gradients(model: nn.Module) -> tuple[list[Tensor], dict[RankGroups, list[Tensor]]]:
    managed: dict[nn.Parameter, MainGrad] = {}
    for root in sharded_roots(model):
        managed.update(root.main_grads())
    sharded: dict[RankGroups, list[Tensor]] = {
        grad.groups: [] for grad in managed.values() if grad.groups
    }
    whole: list[Tensor] = []
    for param in model.parameters():
        decoupled = param in managed and managed[param].decoupled
        grad = getattr(param, "decoupled_grad", None) if decoupled else param.grad
        if grad is None:
            continue
        groups = managed[param].groups if param in managed else sharding_groups(grad)
        (sharded.setdefault(groups, []) if groups else whole).append(local_part(grad))
    return whole, sharded
