"""Weights that autograd saves for backward, as places in a gathered buffer instead of tensors."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphfsdp.base.dtensors import as_dtensor
from graphfsdp.errors import PhaseError
from graphfsdp.sharding.buffer import ShardBuffer


class _Place(NamedTuple):
    """A saved weight: where it lies in a gathered buffer."""

    buffer_index: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _DTensorPlace(NamedTuple):
    local: _Place
    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


class _Pack:
    """Saves a tensor, or its place where it looks at a gathered buffer.

    A class, so that a unit knows the hooks of the unit around it.
    """

    def __init__(self, storages: dict[int, int]) -> None:
        self._storages = storages  # index of the buffer by identity of its storage

    def __call__(self, tensor: Tensor) -> Any:
        if type(tensor) is DTensor:
            local = self(tensor._local_tensor)
            if not isinstance(local, _Place):
                return tensor
            mesh, places = tensor.device_mesh, tensor.placements
            return _DTensorPlace(local, mesh, places, tensor.shape, tensor.stride())
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        index = self._storages.get(tensor.untyped_storage()._cdata)
        if index is None:
            return tensor
        return _Place(index, tensor.shape, tensor.stride(), tensor.storage_offset())


def saving_places(
    unit: str, buffers: Sequence[ShardBuffer], gather: Callable[[ShardBuffer], Tensor]
) -> AbstractContextManager[Any]:
    """Save places of a unit's unsharded buffers while the body runs.

    Whenever backward asks for a place, ``gather`` is called, and returns the whole buffer.
    """
    storages = {
        buffer.full.untyped_storage()._cdata: index
        for index, buffer in enumerate(buffers)
        if buffer.full is not None
    }
    moments = [buffer.moment() for buffer in buffers]

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _DTensorPlace):
            local, mesh, places, shape, stride = saved
            whole: Tensor = as_dtensor(unpack(local), mesh, places, shape, stride)
            return whole
        if not isinstance(saved, _Place):
            return saved  # type: ignore[no-any-return]
        buffer = buffers[saved.buffer_index]
        if buffer.moment()[0] != moments[saved.buffer_index][0]:
            raise PhaseError(
                f"weights of unit {unit or '(root)'!r} were written between its forward and its "
                "backward, which gathers them again: the gradients would be wrong (without "
                "fully_shard, autograd says that they were modified by an inplace operation). "
                "Remedy: optimizer.step() and other writes after the last backward; or clone() "
                "what backward needs"
            )
        return gather(buffer).as_strided(saved.shape, saved.stride, saved.offset)

    return saved_tensors_hooks(_Pack(storages), unpack)


def foreign_hooks_are_active() -> bool:
    """Tell whether somebody else packs saved tensors here (activation checkpointing).

    Only the innermost hooks are asked, and a checkpoint must see every saved tensor. It saves no
    weights itself: it runs the unit's forward again.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and not isinstance(top[0], _Pack)


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass under way is over, behind those given before it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
