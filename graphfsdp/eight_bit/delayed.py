"""Scales of float8 that come from the magnitudes of earlier backward passes.

A layer has two buffers: ``fp8_scale`` [3], of input, weight and gradient, and ``fp8_amax_history``
[H, 3],
whose first row takes the largest magnitudes since the last update. When a backward pass of the
model is over all layers are updated at once, so that scales stand still from a forward pass to the
end of its backward, recomputation included.

Source: Transformer Engine 2.20, pytorch/quantization.py (_default_get_amax_and_update_history,
_default_sf_compute) and common/recipe (DelayedScaling). Other than there, a magnitude that is not
finite makes NaN of the numbers, where a saturating cast would hide it, and leaves no trace in the
history, where it would hold the scale for as many steps as that is long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from graphfsdp.base.collectives import all_reduce_
from graphfsdp.base.torch_internals import (
    buffers_of,
    foreach_copy_,
    tree_leaves,
    when_backward_ends,
)
from graphfsdp.config import at_least
from graphfsdp.eight_bit.formats import NUMBER
from graphfsdp.errors import ConfigError

INPUT, WEIGHT, GRADIENT = range(3)
SCALE, HISTORY = "fp8_scale", "fp8_amax_history"


@dataclass(frozen=True)
class DelayedScaling:
    """Words and defaults of Transformer Engine's recipe.

    Attributes:
        margin: Scales are ``2**margin`` times smaller than what would reach the largest number.
        amax_history_len: Updates whose magnitudes are kept, the last one included.
        amax_compute_algo: "max" of these decides, or "most_recent".
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"

    def __post_init__(self) -> None:
        at_least("margin", self.margin, 0)
        at_least("amax_history_len", self.amax_history_len, 1)
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ConfigError(
                f"amax_compute_algo must be 'max' or 'most_recent', got {self.amax_compute_algo!r}"
            )


class Delayed(Protocol):
    """A layer with such scales."""

    recipe: DelayedScaling
    fp8_scale: Tensor
    fp8_amax_history: Tensor
    of_gradients: torch.dtype


def delayed_scale(layer: Delayed, values: Tensor, which: int, *, record: bool) -> Tensor:
    """Return the [] scale to quantise with, NaN for values that are not all finite.

    Capture: no host sync; about six operators.
    """
    amax = values.abs().amax().to(torch.float32)
    finite = amax.isfinite()
    if record:
        place = layer.fp8_amax_history[0, which]
        place.copy_(torch.maximum(place, amax.where(finite, 0.0)))
    return layer.fp8_scale[which].where(finite, torch.nan)


def update_when_backward_ends(model: nn.Module, args: Any, output: Any) -> None:
    """Take note of a forward pass, as its hook."""
    outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    outputs = [each for each in outputs if each.requires_grad]
    layers: Any = [each for each in model.modules() if HISTORY in buffers_of(each)]
    if outputs and layers:
        update = partial(update_scales, layers)
        register_multi_grad_hook(outputs, lambda grad: when_backward_ends(update), mode="any")


@torch.no_grad()
def update_scales(layers: Sequence[Delayed]) -> None:
    """Make new scales of what layers of one recipe have recorded, and begin a row of the history.

    Capture: no host sync; an all-reduce, two operators a tensor and about twenty others.
    """
    recipe = layers[0].recipe
    history = torch.stack([layer.fp8_amax_history for layer in layers])  # [L, H, 3]
    scale = torch.stack([layer.fp8_scale for layer in layers])
    everyone = dist.group.WORLD  # None without a process group
    if everyone is not None and everyone.size() > 1:
        recent = history[:, 0].contiguous()
        all_reduce_(recent, everyone, reduction="max")
        history[:, 0] = recent
    amax = history.amax(1) if recipe.amax_compute_algo == "max" else history[:, 0].clone()
    largest = torch.full_like(scale, torch.finfo(NUMBER).max)
    largest[:, GRADIENT] = torch.finfo(layers[0].of_gradients).max
    new = (largest / amax / 2**recipe.margin).clamp(max=torch.finfo(torch.float32).max)
    history = history.roll(-1, 1)
    history[:, 0] = 0.0
    foreach_copy_([layer.fp8_amax_history for layer in layers], list(history))
    foreach_copy_([layer.fp8_scale for layer in layers], list(new.where(amax > 0, scale)))
