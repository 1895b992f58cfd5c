"""Tells where code of torch.compile may run."""

import sys
from typing import Any

from torch import nn


def has_compiled_regions(model: nn.Module) -> bool:
    """Tell whether a module is made by torch.compile, or was compiled in place."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


def has_compiled() -> bool:
    """Tell whether torch.compile has compiled anything in this process."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames") or counters.get("stats"))
