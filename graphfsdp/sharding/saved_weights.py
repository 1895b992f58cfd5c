"""Weights that autograd saves for backward, as places in a gathered buffer instead of tensors."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from graphfsdp.sharding.buffer import ShardBuffer
from graphfsdp.sharding.weight_writes import refuse_other_weights


class _Place:
    """A saved weight: where it lies in a gathered buffer."""

    __slots__ = ("buffer_index", "offset", "shape", "stride")

    def __init__(self, buffer_index: int, tensor: Tensor) -> None:
        self.buffer_index = buffer_index
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()


class _DTensorPlace:
    """A saved weight that is a DTensor of model parallelism: the place of its part here."""

    __slots__ = ("local", "mesh", "placements", "shape", "stride")

    def __init__(self, local: _Place, tensor: DTensor) -> None:
        self.local = local
        self.mesh = tensor.device_mesh
        self.placements = tensor.placements
        self.shape = tensor.shape
        self.stride = tensor.stride()


class _Pack:
    """Saves a tensor, or its place where it looks at a gathered buffer.

    A class, so that a unit knows the hooks of the unit around it.
    """

    def __init__(self, storages: dict[int, int]) -> None:
        self._storages = storages  # index of the buffer by identity of its storage

    def __call__(self, tensor: Tensor) -> Any:
        if type(tensor) is DTensor:
            local = self(tensor._local_tensor)
            return _DTensorPlace(local, tensor) if isinstance(local, _Place) else tensor
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        index = self._storages.get(tensor.untyped_storage()._cdata)
        return tensor if index is None else _Place(index, tensor)


def saving_places(
    unit: str, buffers: Sequence[ShardBuffer], gather: Callable[[ShardBuffer], Tensor]
) -> AbstractContextManager[Any]:
    """Save places of unsharded buffers while the body runs; backward gathers them again.

    Args:
        unit: Its name.
        buffers: The buffers of a unit, unsharded.
        gather: Called whenever backward asks for a place; returns the whole buffer.
    """
    storages = {
        buffer.full.untyped_storage()._cdata: index
        for index, buffer in enumerate(buffers)
        if buffer.full is not None
    }

    moments = [buffer.moment() for buffer in buffers]

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _DTensorPlace):
            return DTensor.from_local(
                unpack(saved.local),
                saved.mesh,
                saved.placements,
                run_check=False,
                shape=saved.shape,
                stride=saved.stride,
            )
        if not isinstance(saved, _Place):
            return saved  # type: ignore[no-any-return]
        buffer = buffers[saved.buffer_index]
        refuse_other_weights(unit, moments[saved.buffer_index], buffer.moment())
        full = gather(buffer)
        return full.as_strided(saved.shape, saved.stride, saved.offset)

    return saved_tensors_hooks(_Pack(storages), unpack)


def foreign_hooks_are_active() -> bool:
    """Tell whether somebody else packs saved tensors here (activation checkpointing).

    Only the innermost hooks are asked, and a checkpoint must see every saved tensor. It saves no
    weights itself: it runs the unit's forward again.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and not isinstance(top[0], _Pack)


def is_in_backward() -> bool:
    """Tell whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1
