"""Brings tensors that are being loaded into the cut of those that they are copied into."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, wrap_like
from graphfsdp.base.torch_internals import part_and_offset


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
