"""Weights that autograd has saved for backward, as places in a buffer that is gathered again."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from graphfsdp.base.dtensors import Wrapping
from graphfsdp.base.torch_internals import key_of
from graphfsdp.errors import PhaseError
from graphfsdp.sharding.buffer import ShardBuffer


class _SavedWeight(NamedTuple):
    """A weight that autograd has saved for backward: where it lies in a gathered buffer."""

    buffer_index: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype  # of a buffer of bytes each weight is read in its own


class _Wrapped(NamedTuple):
    """A saved wrapper (DTensor, 8-bit numbers with scales) some of whose tensors are places."""

    wrapping: Wrapping
    parts: list[Any]


class _Pack:
    """Saves a tensor, or its place where it looks at a gathered buffer.

    A class, so that a unit knows the hooks of the unit around it.
    """

    def __init__(self, storages: dict[int, int]) -> None:
        self._storages = storages  # index of the buffer by identity of its storage

    def __call__(self, tensor: Tensor) -> Any:
        wrapping, inside = Wrapping.take_apart(tensor)
        if wrapping is not None:
            parts = [self(part) for part in inside]
            has_places = any(isinstance(part, _SavedWeight | _Wrapped) for part in parts)
            return _Wrapped(wrapping, parts) if has_places else tensor
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        index = self._storages.get(key_of(tensor.untyped_storage()))
        if index is None:
            return tensor
        return _SavedWeight(
            index, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        )


def saving_places(
    unit: str, buffers: Sequence[ShardBuffer], gather: Callable[[ShardBuffer], Tensor]
) -> AbstractContextManager[Any]:
    """Save places of a unit's unsharded buffers while the body runs.

    Whenever backward asks for a place, ``gather`` is called, and returns the whole buffer.
    """
    storages = {
        key_of(buffer.full.untyped_storage()): index
        for index, buffer in enumerate(buffers)
        if buffer.full is not None
    }
    moments = [buffer.moment() for buffer in buffers]

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _Wrapped):
            return saved.wrapping.around(unpack(part) for part in saved.parts)
        if not isinstance(saved, _SavedWeight):
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
        full = gather(buffer)
        if full.dtype != saved.dtype:
            full = full.view(saved.dtype)
        return full.as_strided(saved.shape, saved.stride, saved.offset)

    return saved_tensors_hooks(_Pack(storages), unpack)


def foreign_hooks_are_active() -> bool:
    """Tell whether somebody else packs saved tensors here (activation checkpointing).

    Only the innermost hooks are asked, and a checkpoint must see every saved tensor. It saves no
    weights itself: it runs the unit's forward again.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and not isinstance(top[0], _Pack)
