"""What FusedAdam refuses, each refusal naming the parameter or the setting."""

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphfsdp.errors import ConfigError
from graphfsdp.optim.adam_settings import AdamSettings
from graphfsdp.optim.flat_runs import is_dense, same_layout


def check_group(group: Mapping[str, Any], row: int) -> None:
    """Refuse hyper-parameters that Adam cannot use.

    Args:
        group: A parameter group.
        row: Its index, for messages.

    Raises:
        ConfigError: a value is out of its range; the message names group, key and value.
    """
    where = f"of parameter group {row}"
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.dtype.is_floating_point:
            raise ConfigError(
                f"lr {where} must be a number or a float tensor of one element, "
                f"got shape {tuple(lr.shape)}, {lr.dtype}"
            )
    else:
        _check_number("lr", lr, where)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas {where} must be a pair of numbers, got {betas!r}")
    for index, beta in enumerate(betas):
        _check_number(f"betas[{index}]", beta, where, below_one=True)
    _check_number("eps", group["eps"], where)
    _check_number("weight_decay", group["weight_decay"], where)


def _check_number(name: str, value: object, where: str, *, below_one: bool = False) -> None:
    expected = "a number in [0, 1)" if below_one else "a finite number of at least 0"
    # Only lr may be a tensor: any other would be read on the host here, and frozen.
    if isinstance(value, Tensor) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} {where} must be {expected}, got {value!r}")
    if not 0 <= float(value) < (1 if below_one else float("inf")):
        raise ConfigError(f"{name} {where} must be {expected}, got {value!r}")


def check_parameter(param: Tensor, name: str) -> None:
    """Refuse a parameter that the step cannot update.

    Raises:
        ConfigError: it is sparse, complex, integer, or shares its elements' memory.
    """
    if param.layout != torch.strided or not param.dtype.is_floating_point:
        raise ConfigError(
            f"FusedAdam trains dense tensors of a real floating-point dtype; {name} has the "
            f"layout {param.layout} and the dtype {param.dtype}"
        )
    if any(size > 1 and step == 0 for size, step in zip(param.shape, param.stride(), strict=True)):
        raise ConfigError(
            f"{name} is expanded (shape {tuple(param.shape)}, strides {param.stride()}), so that "
            f"several elements share one place in memory; give a contiguous copy"
        )


def check_lr_device(group: Mapping[str, Any], row: int) -> None:
    """Refuse an lr that is a tensor on another device than the group's parameters.

    Raises:
        ConfigError: it would have to be read on the host in each step.
    """
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return
    for param in group["params"]:
        if param.device != lr.device:
            raise ConfigError(
                f"lr of parameter group {row} is a tensor on {lr.device}, its parameters are on "
                f"{param.device}; move lr there, or give a number, which stays live as well"
            )


def check_state(
    param: Tensor, state: Mapping[str, Tensor], name: str, settings: AdamSettings
) -> None:
    """Refuse state tensors that somebody has replaced by others that do not fit.

    Raises:
        ConfigError: a moment or main weight has another shape, layout, dtype or device.
    """
    like = (
        param if is_dense(param.shape, param.stride()) else torch.empty_like(param, device="meta")
    )
    for key, dtype in settings.state_dtypes(param).items():
        tensor = state.get(key)
        if (
            tensor is None
            or tensor.dtype != dtype
            or tensor.device != param.device
            or not same_layout(tensor, like)
        ):
            got = "missing"
            if tensor is not None:
                got = (
                    f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}, "
                    f"{tensor.dtype}, on {tensor.device}"
                )
            raise ConfigError(
                f"the state {key!r} of {name} is {got}; expected shape {tuple(like.shape)}, "
                f"strides {like.stride()}, {dtype}, on {param.device}. It does not fit the "
                "parameter any more: was the model moved or cast after the first step? "
                "load_state_dict copies values into the right places"
            )


def check_gradient(param: Tensor, grad: Tensor, name: str) -> None:
    """Refuse a gradient that the step cannot read.

    Raises:
        ConfigError: the gradient is sparse, complex, integer, or of another shape or device.
    """
    problem = None
    if grad.layout != torch.strided:
        problem = (
            f"has the layout {grad.layout}; expected a dense one (for nn.Embedding: sparse=False)"
        )
    elif not grad.dtype.is_floating_point:
        problem = f"has the dtype {grad.dtype}; expected a real floating-point dtype"
    elif grad.shape != param.shape:
        problem = f"has the shape {tuple(grad.shape)}; expected {tuple(param.shape)}"
    elif grad.device != param.device:
        problem = f"is on {grad.device}; expected {param.device}, as its parameter"
    if problem is not None:
        raise ConfigError(f"the gradient of {name} {problem}")


__all__ = ["check_gradient", "check_group", "check_lr_device", "check_parameter", "check_state"]
