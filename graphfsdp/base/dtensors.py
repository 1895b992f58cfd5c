"""Plain parts of DTensors, for code that must work with both and need not import either.

And tensors that are being loaded, brought into the cut of those that they are copied into.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    known_spec,
    local_tensor_of,
    part_and_offset,
    spec_of,
)

# What the class of a wrapper has that says itself what is gathered of it.
EXTENSION = "fsdp_pre_all_gather"
# One group for each mesh axis that a tensor is sharded over; () where each rank holds all of it.
RankGroups = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class Wrapping:
    """What a tensor that wraps others (a DTensor) is made of, but for the tensors in it."""

    kind: type
    parts: tuple[tuple[str, Any], ...]  # by name; None for a tensor
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def take_apart(cls, tensor: Tensor) -> "tuple[Wrapping | None, list[Tensor]]":
        """Return this of a tensor and what it wraps; None and the tensor if it wraps nothing."""
        if not is_traceable_wrapper_subclass(tensor):
            return None, [tensor]
        names, context = tensor.__tensor_flatten__()
        parts = [(name, getattr(tensor, name)) for name in names]
        rest = tuple((name, None if isinstance(part, Tensor) else part) for name, part in parts)
        wrapping = cls(type(tensor), rest, context, tensor.shape, tensor.stride())
        return wrapping, [part for _, part in parts if isinstance(part, Tensor)]

    def around(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return such a tensor that wraps other ones."""
        inside = iter(tensors)
        parts = {name: next(inside) if part is None else part for name, part in self.parts}
        kind: Any = self.kind
        made: Tensor = kind.__tensor_unflatten__(parts, self.context, self.shape, self.stride)
        made.__class__ = kind  # of a child that leaves this to its parent
        return made


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor, without importing torch.distributed."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor, detached; a plain tensor is returned as it is.

    Of a wrapper that FSDP2 would ask what to gather (sharding/extension.py), what it wraps.
    """
    if is_dtensor(tensor):  # not to_local(), which is an operator of DTensors for each tensor
        tensor = local_tensor_of(tensor).detach()
    inside = unwrapped(tensor)
    return tensor if inside is tensor else inside.detach()


def unwrapped(tensor: Tensor) -> Tensor:
    """Return what a wrapper that says itself what is gathered of it wraps; else the tensor."""
    if not hasattr(tensor, EXTENSION):
        return tensor
    # __tensor_flatten__ would name it, but torchao's reads a scale's value there: a host sync.
    held = (value for value in vars(tensor).values() if isinstance(value, Tensor))
    return next(value for value in held if value.shape == tensor.shape)


def sharding_groups(tensor: Tensor) -> RankGroups:
    """The ranks that hold the other parts, a group per sharded mesh axis; none if plain."""
    if not is_dtensor(tensor):
        return ()
    dtensor: Any = tensor
    mesh = dtensor.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, place in enumerate(dtensor.placements)
        if not place.is_replicate()
    )


def num_meshes(tensors: Iterable[Tensor]) -> int:
    """Return on how many meshes tensors lie; plain ones count as one more."""
    return len({getattr(tensor, "device_mesh", None) for tensor in tensors})


def wrap_like(local: Tensor, like: Tensor) -> Tensor:
    """This rank's part as a DTensor, a view, laid out as ``like``; ``local`` itself if plain."""
    if not is_dtensor(like):
        return local
    dtensor: Any = like
    spec = spec_of(dtensor.device_mesh, dtensor.placements, like.shape, like.stride(), local.dtype)
    return can_be_copied(type(dtensor)(local.detach(), spec, requires_grad=False))


@torch.no_grad()
def recut(value: Any, like: Any) -> Tensor:
    """Return a value, plain and whole or a DTensor, cut like the tensor that it is meant for.

    torch's ``distribute_tensor`` cuts every tensor by ``torch.chunk``, whatever placement it was
    asked for, so what ``set_model_state_dict(full_state_dict=True)`` hands over can have other rows
    than the parameter here. A DTensor of another cut becomes whole for a moment: collective over
    its mesh, so that every rank gives the same tensors in the same order.
    """
    found: Tensor = value
    if not is_dtensor(like) or value.shape != like.shape or value is like or like.is_meta:
        return found
    if is_dtensor(value):
        if _placed_alike(value, like):
            return found
        found = value.full_tensor()
    sizes, offsets = part_and_offset(like.shape, like.device_mesh, like.placements)
    here = tuple(slice(first, first + n) for first, n in zip(offsets, sizes, strict=True))
    return wrap_like(found.detach()[here].to(like.device, copy=True), like)


def recut_states(state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict, cut as the optimizer's tensors are or will be; misfitting groups stay."""
    states = {key: dict(entries) for key, entries in state_dict["state"].items()}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for param, key in zip(group["params"], saved["params"], strict=False):
            entries = states.get(key, {})
            for name, value in entries.items():
                existing = optimizer.state.get(param, {}).get(name)
                like = existing if isinstance(existing, Tensor) else param
                # A step count has the shape of a 0-D parameter, but is nobody's part.
                if isinstance(value, Tensor) and value.shape == like.shape and name != "step":
                    entries[name] = recut(value, like)
    return {**state_dict, "state": states}


def _placed_alike(value: Any, like: Any) -> bool:
    """Return whether two DTensors say that they are cut alike; equality is not enough.

    An uneven placement of ours equals torch's, so that operators take both.
    """
    return bool(
        value.device_mesh == like.device_mesh
        and value.placements == like.placements
        and all(type(a) is type(b) for a, b in zip(value.placements, like.placements, strict=True))
    )


def can_be_copied(tensor: Tensor) -> Tensor:
    """Return a DTensor that ``copy.deepcopy`` and ``torch.save`` take.

    It shares memory and the count of writes. torch gives a DTensor the storage offset of its local
    part, though it has no storage, and tells from a data pointer of zero that it has none: so it
    reads the storage of those whose local part begins in the middle of a buffer.
    """
    if not is_dtensor(tensor) or tensor.storage_offset() == 0:
        return tensor
    with _WithoutOffset():  # type: ignore[no-untyped-call]
        return tensor.detach()


class _WithoutOffset(TorchDispatchMode):
    """Returns other DTensors in the place of those that an operator makes, over the same memory.

    What happens here is below autograd, which counts writes into the result as into the argument.
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_dtensor(result):
            return result  # the part that one without offset is made around
        nowhere = torch.empty(0, dtype=result.dtype, device=result.device)
        same: Any = type(result)(nowhere, known_spec(result), requires_grad=False)
        same._local_tensor = local_tensor_of(result)
        return same
