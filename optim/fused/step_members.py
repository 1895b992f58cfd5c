"""Which parameters take a step, with their names for messages and the checks before a plan."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part
from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused.step_checks import (
    check_gradient,
    check_parameter,
    check_rows,
    check_state,
)
from graphfsdp.optim.fused.step_plan import local_state
from graphfsdp.optim.fused.step_settings import StepSettings


class Stepped(NamedTuple):
    """A parameter that takes the step.

    Attributes:
        position: Place among all parameters of the optimizer.
        row: Its group.
        param: The parameter itself.
        grad: This rank's part of its gradient.
    """

    position: int
    row: int
    param: Tensor
    grad: Tensor


def parameter_name(groups: Sequence[Mapping[str, Any]]) -> Callable[[int, int], str]:
    """Return a function from group and position to the parameter's name for messages."""

    def name(row: int, position: int) -> str:
        names = groups[row].get("param_names")
        if names is not None:
            return f"parameter {names[position]!r}"
        return f"parameter {position} of group {row}"

    return name


def check_params(groups: Sequence[Mapping[str, Any]], row: int, settings: StepSettings) -> None:
    """Refuse parameters of a group that was added, alone or beside those of the other groups.

    Raises:
        ConfigError: one of them cannot be trained; it is named.
    """
    name_of = parameter_name(groups)
    for index, param in enumerate(groups[row]["params"]):
        check_parameter(local_part(param), name_of(row, index))
        if settings.uses_scales:
            check_rows(param, name_of(row, index))
    check_devices(groups, settings)


def check_devices(groups: Sequence[Mapping[str, Any]], settings: StepSettings) -> None:
    """Refuse parameters on several devices where their gradients have one norm.

    Raises:
        ConfigError: two devices are named, with a parameter on each.
    """
    if not settings.steers:
        return
    name_of = parameter_name(groups)
    first: tuple[str, torch.device] | None = None
    for row, group in enumerate(groups):
        for index, param in enumerate(group["params"]):
            name = name_of(row, index)
            first = first or (name, param.device)
            if param.device != first[1]:
                raise ConfigError(
                    "max_grad_norm, skip_nonfinite and grad_scaler need the norm of all gradients "
                    f"on one device, but {first[0]} is on {first[1]} and {name} on "
                    f"{param.device}. Remedy: an optimizer for each device, without these"
                )


def find_stepped(
    groups: Sequence[Mapping[str, Any]],
    grads: Sequence[Tensor | None],
    states: Mapping[Tensor, dict[str, Tensor]],
    settings: StepSettings,
) -> list[Stepped]:
    """Return the parameters with a gradient.

    Raises:
        ConfigError: a gradient or a state tensor cannot be used; it is named.
    """
    check_devices(groups, settings)
    name_of = parameter_name(groups)
    found = []
    index = 0
    for row, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            grad = grads[index]
            if grad is not None:
                name = name_of(row, position)
                local = local_part(param)
                check_gradient(local, grad, name)
                if states.get(param):
                    check_state(param, local_state(states[param]), name, settings)
                elif settings.uses_scales:
                    check_rows(param, name)
                found.append(Stepped(index, row, param, grad))
            index += 1
    return found


def reset_decoupled(params: Sequence[Tensor], *, set_to_none: bool) -> None:
    """Reset ``decoupled_grad`` where there is one.

    Args:
        params: The parameters.
        set_to_none: Unbind the gradients instead of filling them with zeros.
    """
    for param in params:
        grad = getattr(param, "decoupled_grad", None)
        if grad is None:
            continue
        if set_to_none:
            param.decoupled_grad = None  # type: ignore[attr-defined]
        else:
            grad.detach().zero_()
