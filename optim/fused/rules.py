"""The update rules that share one step: which moments each keeps, and which numbers it reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused.number_checks import check_group, check_lr, check_number

# A row of the hyper-parameter table: lr (None where it is a tensor), the numbers of the first and
# of the second moment, eps, weight decay. What a rule has no use for is zero.
Row = tuple[float | None, float, float, float, float]


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        name: Its name in the operation and the kernels.
        moments: Names of the state tensors that it averages gradients in.
        read: Returns a group's row of the hyper-parameter table.
        check: Refuses numbers of a group that are out of their range.
    """

    name: str
    moments: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Row]
    check: Callable[[Mapping[str, Any], int], None]


def _lr(group: Mapping[str, Any]) -> float | None:
    lr = group["lr"]
    return None if isinstance(lr, Tensor) else lr


def _read_betas(group: Mapping[str, Any]) -> Row:
    beta1, beta2 = group["betas"]
    return _lr(group), beta1, beta2, group.get("eps", 0.0), group["weight_decay"]


def _read_sgd(group: Mapping[str, Any]) -> Row:
    return _lr(group), group["momentum"], group["dampening"], 0.0, group["weight_decay"]


def _check_sgd(group: Mapping[str, Any], row: int) -> None:
    check_lr(group, row)
    for name in ("momentum", "dampening", "weight_decay"):
        check_number(name, group[name], f"of parameter group {row}")


def check_buffers(groups: Sequence[Mapping[str, Any]], has_moments: bool) -> None:
    """Refuse a momentum that began after the optimizer was made without buffers for it.

    Raises:
        ConfigError: the group is named.
    """
    for row, group in enumerate(groups):
        if not has_moments and group.get("momentum"):
            raise ConfigError(
                f"momentum of parameter group {row} became {group['momentum']}, but this "
                "FusedSGD was made with a momentum of 0 and so has no buffers; make it with the "
                "momentum"
            )


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "adam": Rule("adam", ("exp_avg", "exp_avg_sq"), _read_betas, check_group),
        "lion": Rule("lion", ("exp_avg",), _read_betas, check_group),
        "sgd": Rule("sgd", ("momentum_buffer",), _read_sgd, _check_sgd),
    }
)
