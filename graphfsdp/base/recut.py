"""Brings tensors that are being loaded into the cut of those that they are copied into."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, wrap_like
from graphfsdp.base.torch_internals import part_and_offset
from graphfsdp.errors import ConfigError


def recut(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return each value, plain and whole or a DTensor, cut like the tensor that it is meant for.

    torch's ``distribute_tensor`` cuts every tensor by ``torch.chunk``, whatever placement it was
    asked for, so what ``set_model_state_dict(full_state_dict=True)`` hands over can have other rows
    than the parameter here. A DTensor of another cut becomes whole for a moment, one after the
    other. Collective over the mesh where a value is a DTensor with another placement; every rank
    gives the same pairs. ConfigError: rows are not in the order of the ranks here, and a value does
    not say whether its are.
    """
    found = [value for value, _ in pairs]
    unsure = []
    for index, (value, like) in enumerate(pairs):
        if not is_dtensor(like) or value.shape != like.shape or value is like or like.is_meta:
            continue
        if not is_dtensor(value):
            found[index] = _my_part(value, like)
        elif not _placed_alike(value, like):
            _refuse_ambiguous(value, like)
            unsure.append(index)
    for index in _cut_elsewhere(pairs, unsure):
        value, like = pairs[index]
        found[index] = _my_part(_whole(value), like)
    return found


def recut_states(state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict, cut as the optimizer's tensors are or will be; misfitting groups stay."""
    places = list(_state_places(state_dict, optimizer))
    values = recut([(state_dict["state"][key][name], like) for key, name, like in places])
    states = {key: dict(entries) for key, entries in state_dict["state"].items()}
    for (key, name, _), value in zip(places, values, strict=True):
        states[key][name] = value
    return {**state_dict, "state": states}


def _state_places(
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Any, str, Tensor]]:
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for param, key in zip(group["params"], saved["params"], strict=False):
            for name, value in (state_dict["state"].get(key) or {}).items():
                existing = optimizer.state.get(param, {}).get(name)
                like = existing if isinstance(existing, Tensor) else param
                # A step count has the shape of a 0-D parameter, but is nobody's part.
                if isinstance(value, Tensor) and value.shape == like.shape and name != "step":
                    yield key, name, like


def _placed_alike(value: Any, like: Any) -> bool:
    """Return whether two DTensors say that they are cut alike; equality is not enough.

    An uneven placement of ours equals torch's, so that operators take both.
    """
    return bool(
        value.device_mesh == like.device_mesh
        and value.placements == like.placements
        and all(type(a) is type(b) for a, b in zip(value.placements, like.placements, strict=True))
    )


def _refuse_ambiguous(value: Any, like: Any) -> None:
    """Refuse what may be cut in the order of the ranks or not, where that makes a difference."""
    reordered = any(getattr(place, "order", None) is not None for place in like.placements)
    if reordered and value.device_mesh == like.device_mesh and value.placements == like.placements:
        raise ConfigError(
            f"a tensor of shape {tuple(like.shape)} that is to be loaded has the placements "
            f"{value.placements}, expected {like.placements}: it may have been cut by torch or be "
            "a result of arithmetic on a tensor of ours, whose rows lie elsewhere. Remedy: "
            "broadcast_from_rank0=True for whole tensors, or tensors as state_dict() gives them"
        )


def _cut_elsewhere(pairs: Sequence[tuple[Tensor, Tensor]], indices: Sequence[int]) -> list[int]:
    """Return which values have other rows than here on any rank of the mesh.

    Results of arithmetic on our tensors, a ``clone`` among them, say that they are cut by torch
    and have our rows; only the ranks together can tell.
    """
    by_mesh: dict[Any, list[int]] = {}
    for index in indices:
        like: Any = pairs[index][1]
        by_mesh.setdefault(like.device_mesh, []).append(index)
    found = []
    for mesh, members in by_mesh.items():
        alike = [_local_shape(pairs[i][0]) == _local_shape(pairs[i][1]) for i in members]
        flags = torch.tensor(alike, dtype=torch.int32, device=mesh.device_type)
        for axis in range(mesh.ndim):
            dist.all_reduce(flags, dist.ReduceOp.MIN, group=mesh.get_group(axis))
        found += [index for index, flag in zip(members, flags.tolist(), strict=True) if not flag]
    return found


# Without detach() in both: torch remembers by equal placements what an operator returns, and ours
# equals torch's, so that either could get the rows of the other, now or in a later call.


@torch.no_grad()
def _local_shape(tensor: Any) -> torch.Size:
    found: torch.Size = tensor.to_local().shape
    return found


@torch.no_grad()
def _whole(value: Any) -> Tensor:
    found: Tensor = value.full_tensor()
    return found


def _my_part(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's part of a whole tensor, cut like a DTensor; a copy."""
    sizes, offsets = part_and_offset(like.shape, like.device_mesh, like.placements)
    here = tuple(slice(first, first + n) for first, n in zip(offsets, sizes, strict=True))
    part = whole.detach()[here].to(like.device, copy=True)
    return wrap_like(part, like)
