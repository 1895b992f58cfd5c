"""A picture of memory: which parameter lies on which rank."""

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from graphfsdp.errors import ConfigError
from graphfsdp.planning.model_plan import ROOT, ModelPlan
from graphfsdp.sharding.layout import BufferLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_BORDERS = 128  # more ranks than this would be one grey area
_NAMED_SHARE = 0.04  # a parameter is named from this share of the picture's width on


def draw_layout(model: nn.Module | ModelPlan, path: str | os.PathLike[str]) -> None:
    """Draw the flat buffers of a model: one row for each, cut where one rank ends.

    Args:
        model: What ``fully_shard`` has wrapped, or a plan of it.
        path: Of the picture; the name says the format (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is not installed, or nothing is sharded.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "pictures need matplotlib, which is not installed. Remedy: pip install graphfsdp[plot]"
        )
    # Not pyplot, so no window system and no global state.
    from matplotlib.figure import Figure

    buffers = _buffers_of(model)
    figure = Figure(figsize=(12, 1.2 + 0.55 * len(buffers)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for row, (_, layout, names) in enumerate(buffers):
        _draw_buffer(axes, row, layout, names)
    titles = [f"{title}\n{layout.total_numel:,}" for title, layout, _ in buffers]
    axes.set_yticks(range(len(buffers)), titles, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the flat buffer; black: where one rank ends; grey: padding")
    figure.savefig(path)


def _buffers_of(model: nn.Module | ModelPlan) -> list[tuple[str, BufferLayout, Sequence[str]]]:
    found: list[tuple[str, BufferLayout, Sequence[str]]] = []
    if isinstance(model, ModelPlan):
        for plan in model.units:
            for number, buffer in enumerate(plan.buffers):
                if buffer.sharded:
                    title = f"{plan.name or ROOT} {number}"
                    found.append((title, buffer.layout, buffer.names))
    else:
        # Importing DTensor takes a second, which a plan need not wait for.
        from graphfsdp.diagnostics import named_units

        for name, unit in named_units(model):
            for number, shard in enumerate(unit.group.buffers):
                if shard.sharded:
                    items = [item for item in unit.group.managed if item.buffer is shard]
                    names = [item.name for item in items]
                    found.append((f"{name or ROOT} {number}", shard.layout, names))
    if not found:
        raise ConfigError("nothing is sharded (strategy no_shard), so there is nothing to draw")
    return found


def _draw_buffer(axes: "Axes", row: int, layout: BufferLayout, names: Sequence[str]) -> None:
    total = layout.total_numel or 1
    axes.add_patch(_rectangle((0, row - 0.35), 1, 0.7, "#c9cdd3"))
    for position, (slot, name) in enumerate(zip(layout.slots, names, strict=True)):
        start, share = slot.offset / total, slot.numel / total
        axes.add_patch(_rectangle((start, row - 0.35), share, 0.7, f"C{position % 10}"))
        if share >= _NAMED_SHARE:
            text = axes.text(start + share / 2, row, name, fontsize=7, clip_on=True)
            text.set(ha="center", va="center", color="white")
    if layout.num_ranks <= _MAX_BORDERS:
        borders = [rank / layout.num_ranks for rank in range(1, layout.num_ranks)]
        axes.vlines(borders, row - 0.42, row + 0.42, color="black", linewidth=1)


def _rectangle(corner: tuple[float, float], width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=colour, edgecolor="white", linewidth=0.3)
