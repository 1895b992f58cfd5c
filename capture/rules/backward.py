"""Operators whose gradient torch computes by reading values on the host.

Under a dispatch mode torch takes another formula for these, which reads nothing but differs in the
last bits. So a CUDA capture of the eager formula fails, and a recording would not be what eager
computes. Found by running the gradients of torch's whole operator data base with and without a
mode and comparing bits (torch 2.11 to 2.13).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostReadingGradient:
    """One such operator.

    Attributes:
        op: Name without overload.
        overload: Only this one; "" for all.
        argument: Index of the argument whose gradient needs the host.
        remedy: What to write instead.
        before: First torch version that no longer reads the host; () if all do.
    """

    op: str
    overload: str
    argument: int
    remedy: str
    before: tuple[int, int] | tuple[()] = ()

    def applies(self, op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
        """Tell whether this call's gradient will read the host."""
        if op._schema.name != self.op or (self.overload and op._overloadname != self.overload):
            return False
        if self.before and _torch_version() >= self.before:
            return False
        value = args[self.argument] if self.argument < len(args) else None
        return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


_WHERE = "torch.where(mask, value, x)"
_ENTRIES = (
    HostReadingGradient("aten::prod", "", 0, "multiply step by step, or x.log().sum().exp()"),
    HostReadingGradient("aten::masked_fill", "Tensor", 2, _WHERE),
    HostReadingGradient("aten::masked_fill_", "Tensor", 2, _WHERE),
    HostReadingGradient("aten::linalg_lstsq", "", 0, "torch.linalg.solve on the normal equations"),
    HostReadingGradient("aten::cumprod", "", 0, "torch 2.12 or newer", (2, 12)),
)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def host_reading_gradient(
    op: torch._ops.OpOverload, args: Sequence[Any]
) -> HostReadingGradient | None:
    """Return the entry that a call falls under, None if its gradient is harmless."""
    return next((entry for entry in _ENTRIES if entry.applies(op, args)), None)
