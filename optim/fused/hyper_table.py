"""The hyper-parameters of every group as one small table that the kernels read.

Shapes: G = parameter groups.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from graphfsdp.optim.fused.adam_math import HYPER_COLUMNS
from graphfsdp.optim.fused.rules import Row, Rule


class HyperTable:
    """One float64 row per group (see ``HYPER_COLUMNS``), on every device that has parameters.

    Python numbers are compared with what was uploaded and copied only where they changed. An lr
    that is a tensor is copied on the device, as part of the step, and so is always live.
    """

    def __init__(self, rule: Rule) -> None:
        """Make no table yet.

        Args:
            rule: Reads and checks the groups.
        """
        self._rule = rule
        self._rows: list[Row] = []
        self._host = np.zeros((0, len(HYPER_COLUMNS)))
        self._tables: dict[torch.device, Tensor] = {}
        self._lr_slots: list[tuple[int, Tensor]] = []

    def on(self, device: torch.device) -> Tensor:
        """Return the [G, 5] float64 table on a device; its address stays until a group is added.

        Raises:
            KeyError: no parameter is there.
        """
        return self._tables[device]

    def refresh(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Build the tables where there are none, and upload what changed otherwise.

        Raises:
            ConfigError: a changed value is out of its range.

        Capture: nothing is recorded; see ``upload``.
        """
        if self._tables:
            self.upload(groups)
            return
        with torch.no_grad(), _disable_current_modes():
            self.build(groups)

    def clear(self) -> None:
        """Forget the tables: a group was added."""
        self._tables = {}

    def build(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Make the tables anew for these groups and the devices of their parameters.

        Capture: allocates and copies from the host: never inside a recording.
        """
        devices = {param.device for group in groups for param in group["params"]}
        self._host = np.zeros((len(groups), len(HYPER_COLUMNS)))
        host = torch.from_numpy(self._host)
        # The CPU table is the host memory itself: writing it is no operation that a CPU
        # recording could see and replay.
        self._tables = {
            device: host if device.type == "cpu" else torch.zeros_like(host, device=device)
            for device in devices
        }
        self._rows = []
        self.upload(groups)

    def upload(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Copy the Python numbers to the devices where they changed.

        Args:
            groups: The groups that the table was built for.

        Returns:
            Whether anything changed.

        Raises:
            ConfigError: a changed value is out of its range.

        Capture: nothing is recorded; called before each replay. On CUDA the copy from pageable
            memory is staged by the driver, so that the host memory may be reused at once.
        """
        rows = [self._rule.read(group) for group in groups]
        if rows == self._rows:
            return False
        for index, group in enumerate(groups):
            self._rule.check(group, index)
        if [row[0] is None for row in rows] != [row[0] is None for row in self._rows]:
            self._find_lr_slots(groups)
        for index, values in enumerate(rows):
            if values[0] is not None:
                self._host[index, 0] = values[0]
            self._host[index, 1:] = values[1:]
        for device, table in self._tables.items():
            if device.type != "cpu":
                table.copy_(torch.from_numpy(self._host), non_blocking=True)
        self._rows = rows
        return True

    def copy_tensor_lrs(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy every lr that is a tensor into its row, on the device.

        Capture: one small copy per group and device; recorded, so that replays see new values.
        """
        for row, slot in self._lr_slots:
            lr = groups[row]["lr"]
            slot.copy_(lr if lr.dim() == 0 else lr.reshape(()))

    def _find_lr_slots(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._lr_slots = [
            (row, table[row, 0])
            for row, group in enumerate(groups)
            if isinstance(group["lr"], Tensor)
            for table in self._tables.values()
        ]
