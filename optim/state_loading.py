"""Matching a saved optimizer state with FusedAdam's groups, all checks before any change."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp.errors import ConfigError

# Settings of torch's Adam that say how it runs, not what it computes.
_RUN_SETTINGS = frozenset(
    {"foreach", "capturable", "differentiable", "fused", "amsgrad", "maximize"}
)
_NOT_LOADED = _RUN_SETTINGS | {"decoupled_weight_decay", "params", "param_names", "step"}

Loaded = dict[Tensor, dict[str, Tensor] | None]


def match_state_dict(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    name_of: Callable[[int, int], str],
    *,
    adam_w_mode: bool,
) -> Loaded:
    """Find the saved state of each parameter.

    Args:
        state_dict: As ``Optimizer.state_dict`` makes it, of FusedAdam or torch's Adam or AdamW.
        groups: The optimizer's groups.
        name_of: Gives a parameter's name for messages, from group and position.
        adam_w_mode: The mode of the optimizer that loads.

    Returns:
        For each parameter the tensors ``step``, ``exp_avg``, ``exp_avg_sq`` and maybe
        ``master_param``; None where nothing was saved.

    Raises:
        ConfigError: something does not fit; it is named.
    """
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ConfigError(
            f"the saved state has {len(saved_groups)} parameter groups, "
            f"this optimizer has {len(groups)}"
        )
    loaded: Loaded = {}
    for row, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        _check_settings(saved, row, adam_w_mode=adam_w_mode)
        if len(saved["params"]) != len(group["params"]):
            raise ConfigError(
                f"parameter group {row} of the saved state has {len(saved['params'])} "
                f"parameters, here it has {len(group['params'])}"
            )
        pairs = zip(group["params"], saved["params"], strict=True)
        for position, (param, key) in enumerate(pairs):
            entries = state_dict["state"].get(key)
            loaded[param] = (
                _match_entries(entries, saved, param, name_of(row, position)) if entries else None
            )
    return loaded


def copy_states(loaded: Loaded, states: Mapping[Tensor, dict[str, Tensor]]) -> None:
    """Copy what was saved into the state tensors that exist, which keep address and dtype.

    Args:
        loaded: From ``match_state_dict``.
        states: The optimizer's state; parameters without any are left alone.
    """
    for param, source in loaded.items():
        for key, tensor in (states.get(param) or {}).items():
            if source is not None and key in source:
                tensor.copy_(source[key])
            elif key == "master_param":
                tensor.copy_(param)
            else:  # saved before its first step
                tensor.zero_()


def load_groups(state_dict: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Take over the saved hyper-parameters; an lr that is a tensor here keeps its address."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for key, value in saved.items():
            if key in _NOT_LOADED:
                continue
            current = group.get(key)
            if isinstance(current, Tensor):
                with torch.no_grad():
                    current.copy_(value if isinstance(value, Tensor) else torch.tensor(value))
            elif isinstance(value, Tensor):
                group[key] = value.item()
            else:
                group[key] = tuple(value) if key == "betas" else value


def _check_settings(saved: Mapping[str, Any], row: int, *, adam_w_mode: bool) -> None:
    for key in ("amsgrad", "maximize"):
        if saved.get(key):
            raise ConfigError(
                f"parameter group {row} was saved with {key}=True, which FusedAdam does not have"
            )
    decoupled = saved.get("decoupled_weight_decay", adam_w_mode)
    if bool(decoupled) != adam_w_mode and saved.get("weight_decay"):
        raise ConfigError(
            f"parameter group {row} was saved with decoupled_weight_decay={decoupled} and "
            f"weight_decay={saved['weight_decay']}, this FusedAdam has "
            f"adam_w_mode={adam_w_mode}: the same number means another decay; construct "
            f"FusedAdam with adam_w_mode={bool(decoupled)}"
        )


def _match_entries(
    entries: Mapping[str, Any], saved_group: Mapping[str, Any], param: Tensor, name: str
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    step = entries.get("step", saved_group.get("step"))
    if step is None:
        raise ConfigError(f"the saved state of {name} has no 'step'")
    found["step"] = torch.as_tensor(step, dtype=torch.float32).reshape(())
    for key in ("exp_avg", "exp_avg_sq", "master_param"):
        value = entries.get(key)
        if value is None:
            if key == "master_param":
                continue
            raise ConfigError(f"the saved state of {name} has no {key!r}")
        if value.shape != param.shape:
            raise ConfigError(
                f"the saved {key!r} of {name} has the shape {tuple(value.shape)}, "
                f"expected {tuple(param.shape)}"
            )
        found[key] = value
    return found


__all__ = ["Loaded", "copy_states", "load_groups", "match_state_dict"]
