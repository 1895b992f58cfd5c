"""Plain parts of DTensors, for code that must work with both and need not import either."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.errors import ConfigError


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor, without importing torch.distributed."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor, detached; a plain tensor is returned as it is."""
    if not is_dtensor(tensor):
        return tensor
    dtensor: Any = tensor.detach()
    local: Tensor = dtensor.to_local()
    return local


def sharding_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that hold the other parts of a DTensor; None if each holds all of it.

    Raises:
        ConfigError: it is sharded over several mesh axes at once.
    """
    if not is_dtensor(tensor):
        return None
    dtensor: Any = tensor
    axes = [axis for axis, place in enumerate(dtensor.placements) if not place.is_replicate()]
    if len(axes) > 1:
        raise ConfigError(
            f"a DTensor gradient is sharded over {len(axes)} mesh axes "
            f"({dtensor.placements}); one axis is supported"
        )
    return dtensor.device_mesh.get_group(axes[0]) if axes else None


def wrap_like(local: Tensor, like: Tensor) -> Tensor:
    """Return ``local`` as a DTensor with the mesh, placements and shape of ``like``.

    Args:
        local: This rank's part; the result is a view of it.
        like: A DTensor, or a plain tensor, for which ``local`` is returned as it is.
    """
    return _wrap(local, like, like.shape, like.stride())


def wrap_rows_like(local: Tensor, like: Tensor) -> Tensor:
    """Return ``local`` as a DTensor with the mesh, placements and number of rows of ``like``.

    Args:
        local: [rows, ...] this rank's part, with rows of any shape; the result is a view of it.
        like: [rows, ...] a DTensor that is whole or sharded by rows, or a plain tensor, for which
            ``local`` is returned as it is.
    """
    row = local.shape[1:]
    strides = [math.prod(row[axis:]) for axis in range(len(row) + 1)]
    return _wrap(local, like, torch.Size((*like.shape[:1], *row)), tuple(strides))


def _wrap(local: Tensor, like: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    dtensor: Any = like
    return DTensor.from_local(
        local,
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )


__all__ = ["is_dtensor", "local_part", "sharding_group", "wrap_like", "wrap_rows_like"]
