"""Plain parts of DTensors, for code that must work with both and need not import either."""

from typing import Any

from torch import Tensor


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


def full_value(tensor: Tensor) -> Tensor:
    """Return a DTensor's value over all ranks; a plain tensor is returned as it is.

    Capture: one functional collective where the value is not yet the same on all ranks.
    """
    if not is_dtensor(tensor):
        return tensor
    dtensor: Any = tensor
    value: Tensor = dtensor.full_tensor()
    return value


def wrap_like(local: Tensor, like: Tensor) -> Tensor:
    """Return ``local`` as a DTensor with the mesh, placements and shape of ``like``.

    Args:
        local: This rank's part; the result is a view of it.
        like: A DTensor, or a plain tensor, for which ``local`` is returned as it is.
    """
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    dtensor: Any = like
    return DTensor.from_local(
        local,
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


__all__ = ["full_value", "is_dtensor", "local_part", "wrap_like"]
