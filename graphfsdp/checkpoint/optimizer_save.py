"""What a checkpoint keeps of an optimizer: states by parameter name, groups, and the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphfsdp.checkpoint.named import (
    OPTIMIZER,
    NamedModel,
    cut,
    name_parameters,
    states_by_index,
)
from graphfsdp.checkpoint.parts import NamedPart
from graphfsdp.checkpoint.values import Json, StoreTensor, encode
from graphfsdp.optim.adapters.skip_counter import skip_counter
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer


@dataclass
class SavedOptimizer:
    """An optimizer's state, ready to be written.

    Attributes:
        facts: For the manifest: kind, groups with the names of their parameters, which states
            there are, and everything small.
        parts: The tensors.
    """

    facts: dict[str, Json]
    parts: list[NamedPart] = field(default_factory=list)


def describe_optimizer(
    model: NamedModel, optimizer: torch.optim.Optimizer, store: StoreTensor
) -> SavedOptimizer:
    """Collect the state of an optimizer.

    Args:
        model: Whose parameters it has.
        optimizer: Any torch optimizer.
        store: Keeps large tensors that belong to no parameter.

    Raises:
        CheckpointError: something could only be pickled.
    """
    state_dict = optimizer.state_dict()
    named = name_parameters(model, optimizer)
    groups = []
    for row, (group, saved) in enumerate(zip(named, state_dict["param_groups"], strict=True)):
        numbers = {k: v for k, v in saved.items() if k not in ("params", "param_names")}
        numbers |= _settings(optimizer)
        where = f"{OPTIMIZER}param_groups[{row}]"
        groups.append(
            {
                "params": [member for name, _ in group for member in _member_names(model, name)],
                "hyper": encode(numbers, where, store),
            }
        )
    rest = {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}
    skipped = skip_counter(optimizer)
    if skipped is not None:  # as the optimizers that count themselves have it
        rest.setdefault("control", {"skipped_steps": skipped})
    found = SavedOptimizer(
        {
            "kind": kind_of(optimizer),
            "groups": groups,
            "rest": encode(rest, f"{OPTIMIZER}rest", store),
            "state": {},
        }
    )
    for name, param, index in states_by_index(state_dict, named):
        entries = state_dict["state"].get(index)
        if entries:
            _add_states(found, model, name, param, entries, store)
    return found


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return what optimizers that can load each other's state have in common."""
    if isinstance(optimizer, DeviceOptimizer):
        return optimizer.state_kind
    return type(optimizer).__name__


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """Return what torch's optimizers keep in their groups and ours have once for all of them."""
    if not isinstance(optimizer, DeviceOptimizer):
        return {}
    settings = optimizer.settings
    return {
        "amsgrad": settings.amsgrad,
        "maximize": settings.flags.maximize,
        "bias_correction": settings.flags.bias_correction,
        "decoupled_weight_decay": settings.flags.adam_w_mode,
        "nesterov": settings.flags.nesterov,
    }


def _member_names(model: NamedModel, name: str) -> list[str]:
    if name not in model.tensors:
        return [name]
    return [member.name for member in model.members(name)]


def _add_states(
    found: SavedOptimizer,
    model: NamedModel,
    name: str,
    param: Tensor,
    entries: Mapping[str, Any],
    store: StoreTensor,
) -> None:
    states: dict[str, dict[str, Json]] = {n: {} for n in _member_names(model, name)}
    for key, value in entries.items():
        # A step count is a number beside the others, also that of a 0-D parameter.
        if isinstance(value, Tensor) and name in model.tensors and key != "step":
            part = model.part(param, value)
            if part.whole_shape[:1] == tuple(param.shape[:1]):
                found.parts += cut(OPTIMIZER, model.members(name), part, f"/{key}")
                for member in states:
                    states[member][key] = {"!": "tensor", "key": f"{OPTIMIZER}{member}/{key}"}
                continue
        for member in states:
            states[member][key] = encode(value, f"{OPTIMIZER}{member}/{key}", store)
    found.facts["state"].update(states)
