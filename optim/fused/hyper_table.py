"""The numbers of every group: what an optimizer reads and refuses, and the table on the device.

Shapes: G = parameter groups.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphfsdp.base.torch_internals import without_modes
from graphfsdp.errors import ConfigError

HYPER_COLUMNS = ("lr", "beta1", "beta2", "eps", "weight_decay")

# A row of the table: lr, the numbers of the first and of the second
# moment, eps, weight decay. What an optimizer has no use for is zero.
Row = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class Rule:
    """How the numbers of a group are read and checked."""

    read: Callable[[Mapping[str, Any]], Row]
    check: Callable[[Mapping[str, Any], int], None]  # refuses numbers of a group, given its index


def _read_betas(group: Mapping[str, Any]) -> Row:
    beta1, beta2 = group["betas"]
    return group["lr"], beta1, beta2, group["eps"], group["weight_decay"]


def check_betas(group: Mapping[str, Any], row: int) -> None:
    where = f"of parameter group {row}"
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas {where} must be a pair of numbers, got {betas!r}")
    for index, beta in enumerate(betas):
        check_number(f"betas[{index}]", beta, where, below_one=True)
    for name in ("lr", "eps", "weight_decay"):
        check_number(name, group[name], where)


def check_number(name: str, value: object, where: str, *, below_one: bool = False) -> None:
    """Refuse what is no finite number of at least 0, and optionally below 1."""
    # A tensor would be read on the host here, and frozen. Floats are known by their class: to ask
    # an abstract one takes longer, and a schedule asks each time.
    is_number = isinstance(value, (float, int, numbers.Real))
    if not is_number or not 0 <= value < (1 if below_one else math.inf):  # type: ignore[operator]
        expected = "a number in [0, 1)" if below_one else "a finite number of at least 0"
        remedy = ". Remedy: a number, which stays live" if isinstance(value, Tensor) else ""
        raise ConfigError(f"{name} {where} must be {expected}, got {value!r}{remedy}")


ADAM = Rule(_read_betas, check_betas)


class LiveMemory:
    """Numbers of Python in memory that kernels read: what is written there, replays see.

    On a CPU it is the host's memory itself: writing it is no operation that a recording could see
    and replay. To other devices it is copied; on CUDA the driver stages the copy from pageable
    memory, so that the host's may be written again at once.

    Attributes:
        host: [...] float64, the numbers.
    """

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        """``dtype`` is that of other devices than a CPU."""
        self.host = np.zeros(shape)
        self._dtype = dtype
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the numbers on a device, [...]; the address stays."""
        if device not in self._copies:
            with torch.no_grad(), without_modes():
                host = torch.from_numpy(self.host)
                on_cpu = device.type == "cpu"
                self._copies[device] = host if on_cpu else host.to(device, self._dtype)
        return self._copies[device]

    def upload(self) -> None:
        """Copy what was written to the devices. Capture: nothing is recorded."""
        for device, copy in self._copies.items():
            if device.type != "cpu":
                with torch.no_grad(), without_modes():
                    copy.copy_(torch.from_numpy(self.host), non_blocking=True)


class HyperTable:
    """One float64 row per group (see ``HYPER_COLUMNS``), on every device that has parameters.

    Python numbers are compared with what was uploaded and copied only where they changed.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._rows: list[Row] = []
        self._memory = LiveMemory(0, len(HYPER_COLUMNS))

    def on(self, device: torch.device) -> Tensor:
        """Return the [G, 5] float64 table on a device; its address stays until a group is added."""
        return self._memory.on(device)

    def refresh(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy the Python numbers to the devices where they changed; make the tables if need be.

        Capture: nothing is recorded; called before each replay.
        """
        rows = list(map(self._rule.read, groups))
        if rows != self._rows:
            self._upload(groups, rows)

    def _upload(self, groups: Sequence[Mapping[str, Any]], rows: list[Row]) -> None:
        for index, group in enumerate(groups):
            self._rule.check(group, index)
        if len(self._memory.host) != len(groups):
            self._memory = LiveMemory(len(groups), len(HYPER_COLUMNS))
        self._memory.host[:] = rows
        self._memory.upload()
        self._rows = rows
