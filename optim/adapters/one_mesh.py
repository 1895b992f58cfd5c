"""Steps of torch's optimizers on DTensors of several meshes, one mesh after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_Group = dict[str, Any]


@contextmanager
def one_mesh_at_a_time(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer find groups of parameters on one mesh each while the body runs.

    torch's fused and foreach kernels take lists of tensors, and DTensors on two meshes, or beside
    plain tensors, do not go into one list: so it is with a model that is cut by
    ``parallelize_module`` in parts. The update is parameter by parameter, so no number changes.
    Groups that are stepped tensor by tensor are left as they are.

    Args:
        optimizer: One whose step only reads its groups; torch's Adam, AdamW and SGD do.

    Capture: nothing of its own.
    """
    groups = optimizer.param_groups
    split = [part for group in groups for part in _parts(group)]
    if len(split) == len(groups):
        yield
        return
    optimizer.param_groups = split
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _parts(group: _Group) -> list[_Group]:
    if not (group.get("fused") or group.get("foreach")):
        return [group]
    meshes: dict[Any, list[Tensor]] = {}
    for param in group["params"]:
        meshes.setdefault(getattr(param, "device_mesh", None), []).append(param)
    if len(meshes) < 2:
        return [group]
    return [{**group, "params": params} for params in meshes.values()]
