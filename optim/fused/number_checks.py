"""Which hyper-parameters are refused, each refusal naming group and value."""

import numbers
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from graphfsdp.errors import ConfigError


def check_group(group: Mapping[str, Any], row: int) -> None:
    """Refuse hyper-parameters that Adam or Lion cannot use.

    Args:
        group: A parameter group.
        row: Its index, for messages.

    Raises:
        ConfigError: a value is out of its range; the message names group, key and value.
    """
    check_lr(group, row)
    where = f"of parameter group {row}"
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas {where} must be a pair of numbers, got {betas!r}")
    for index, beta in enumerate(betas):
        check_number(f"betas[{index}]", beta, where, below_one=True)
    check_number("eps", group.get("eps", 0.0), where)
    check_number("weight_decay", group["weight_decay"], where)


def check_lr(group: Mapping[str, Any], row: int) -> None:
    """Refuse an lr that is no number of at least 0 and no float tensor of one element.

    Raises:
        ConfigError: the message names the group and the value.
    """
    where = f"of parameter group {row}"
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        check_number("lr", lr, where)
    elif lr.numel() != 1 or not lr.dtype.is_floating_point:
        raise ConfigError(
            f"lr {where} must be a number or a float tensor of one element, "
            f"got shape {tuple(lr.shape)}, {lr.dtype}"
        )


def check_number(name: str, value: object, where: str, *, below_one: bool = False) -> None:
    """Refuse what is no finite number of at least 0, and optionally below 1.

    Raises:
        ConfigError: the message names it.
    """
    expected = "a number in [0, 1)" if below_one else "a finite number of at least 0"
    # Only lr may be a tensor: any other would be read on the host here, and frozen.
    if isinstance(value, Tensor) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} {where} must be {expected}, got {value!r}")
    if not 0 <= float(value) < (1 if below_one else float("inf")):
        raise ConfigError(f"{name} {where} must be {expected}, got {value!r}")
