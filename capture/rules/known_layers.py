"""Layers and helpers that read on the host in one of their settings: what to do about it."""

import dataclasses
import sys
from types import FrameType

from torch.nn.modules.batchnorm import _BatchNorm

from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp.base.hazards import HazardKind

# Where Hugging Face's models look whether a mask hides anything at all.
_MASKS_OF_TRANSFORMERS = "transformers.masking_utils"


def of_layer(refusal: Refusal) -> Refusal:
    """Return a refusal with the remedy for a known place, if it comes from such a one."""
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
        if frame.f_globals.get("__name__") == _MASKS_OF_TRANSFORMERS:
            return dataclasses.replace(
                refusal,
                what="transformers looks on the host whether attention_mask hides any token; a "
                "replay would go on with the answer for this batch",
                remedy="no attention_mask where no token is hidden; or one of four dimensions, "
                "[batch, 1, queries, keys] of bool, True where a query sees a key (for a causal "
                "model its causal part included), which is taken as it is",
            )
        frame = frame.f_back
    return refusal
