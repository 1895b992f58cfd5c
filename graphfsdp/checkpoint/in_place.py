"""Keeps the tensors of an optimizer that replaces them when it loads a state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part


def load_in_place(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state into the tensors that exist, so that a captured step goes on with it.

    torch's optimizers put new tensors into their state and their groups. Where one existed with
    the same shape, dtype and device, its values are replaced instead.
    """
    states = {param: dict(entries) for param, entries in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state_dict)
    with torch.no_grad():
        for param, entries in optimizer.state.items():
            if isinstance(entries, dict):
                _keep(entries, states.get(param, {}))
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            _keep(group, before)


def _keep(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    for key, old in before.items():
        new = now.get(key)
        if not isinstance(old, Tensor) or new is None or new is old:
            continue
        if not isinstance(new, Tensor):
            new = torch.as_tensor(new, dtype=old.dtype, device=old.device)
        if _is_like(new, old):
            local_part(old).copy_(local_part(new))
            now[key] = old


def _is_like(new: Tensor, old: Tensor) -> bool:
    return (
        new.shape == old.shape
        and new.dtype == old.dtype
        and new.device == old.device
        and local_part(new).shape == local_part(old).shape
    )
