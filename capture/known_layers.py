"""Layers of torch that read on the host in one of their settings: what to do about it."""

import dataclasses
import sys
from types import FrameType

from torch.nn.modules.batchnorm import _BatchNorm

from graphfsdp._capture.rules import Refusal
from graphfsdp.hazards import HazardKind


def of_layer(refusal: Refusal) -> Refusal:
    """Return a refusal with the remedy for a layer of torch, if it comes from such a one."""
    if refusal.kind is not HazardKind.HOST_READ:
        return refusal
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(owner, _BatchNorm) and owner.momentum is None:
            name = f"{type(owner).__name__}(momentum=None)"
            return dataclasses.replace(
                refusal,
                what=f"{name} counts batches on the device and reads the count on the host, for "
                "the cumulative average of its running statistics; a replay would go on with "
                "the count of this iteration",
                remedy="a momentum, such as the default 0.1; track_running_stats=False; or eval() "
                "of this layer in training, which leaves the statistics alone",
            )
        frame = frame.f_back
    return refusal


__all__ = ["of_layer"]
