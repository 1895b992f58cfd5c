"""Remedies for known places: optimizers, and layers and helpers that read on the host."""

import dataclasses
import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp.base.hazards import HazardKind

# Where Hugging Face's models look whether a mask hides anything at all.
_MASKS_OF_TRANSFORMERS = "transformers.masking_utils"


def for_this_place(refusal: Refusal) -> Refusal:
    refusal = _for_optimizers(refusal)
    return _for_layers(refusal) if refusal.kind is HazardKind.HOST_READ else refusal


def running_optimizer() -> torch.optim.Optimizer | None:
    """Return the optimizer whose step is on this thread's stack; for what runs rarely."""
    for frame in _frames():
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(owner, torch.optim.Optimizer):
            return owner
    return None


def _for_optimizers(refusal: Refusal) -> Refusal:
    optimizer = running_optimizer()
    if optimizer is None:
        return refusal
    return dataclasses.replace(
        refusal,
        what=f"{type(optimizer).__name__}.step: {refusal.what}",
        remedy="an optimizer that can be captured, such as those of graphfsdp.optim; "
        "scope='forward_backward', which leaves any optimizer outside the graph; in one "
        f"of your own: {refusal.remedy}",
    )


def _for_layers(refusal: Refusal) -> Refusal:
    for frame in _frames():
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
    return refusal


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
