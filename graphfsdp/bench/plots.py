"""Pictures of a result, drawn with matplotlib where it is installed."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphfsdp.bench.records import REFERENCE, BenchResult, CaseResult
from graphfsdp.bench.words import contender_names, workload_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One colour for each contender in every picture, readable for the colour-blind (Okabe & Ito).
_COLOURS = (
    ("eager", "#6b6b6b"),
    ("pytorch", "#000000"),
    ("compile", "#e69f00"),
    ("reduce_overhead", "#b8860b"),
    ("fsdp2", "#56b4e9"),
    ("fsdp2_compile", "#0072b2"),
    ("megatron_fsdp", "#009e73"),
    ("forward_backward", "#cc79a7"),
    ("full_iteration", "#d55e00"),
    ("compile_full_iteration", "#7b1fa2"),
)
_OTHER = "#888888"


def draw_all(result: BenchResult, folder: Path) -> list[str]:
    """Draw every picture that the result has numbers for.

    Returns:
        Names of the files in ``folder``; none where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None or not result.cases:
        return []
    pictures: Mapping[str, Callable[[BenchResult], Any]] = {
        "crossover.png": crossover,
        "step_ms.png": bars,
        "distribution.png": distributions,
        "memory.png": memory,
    }
    drawn = []
    for name, draw in pictures.items():
        figure = draw(result)
        if figure is not None:
            figure.savefig(folder / name)
            drawn.append(name)
    return drawn


def crossover(result: BenchResult) -> Any:
    """Draw how many times as fast as eager each contender is, over the items of a step.

    Lines join the batch sizes of one workload; bars go from the least to the greatest pair.
    """
    figure = _figure(figsize=(9, 5))
    axes = figure.add_subplot()
    names = [name for name in _ran(result.cases) if name != REFERENCE]
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for case in sorted(result.cases, key=lambda case: case.workload.items_per_step):
        groups.setdefault((case.workload.name, case.workload.dtype), []).append(case)
    markers = dict(zip(groups, "os^Dv<>pP*Xh", strict=False))
    for group, cases in groups.items():
        for name in names:
            points = [
                (case.workload.items_per_step, spread)
                for case in cases
                if (spread := case.speedup(name)) is not None
            ]
            if points:
                medians = [spread.median for _, spread in points]
                below = [spread.median - spread.minimum for _, spread in points]
                above = [spread.maximum - spread.median for _, spread in points]
                axes.errorbar(
                    [items for items, _ in points],
                    medians,
                    yerr=(below, above),
                    color=_colour(name),
                    marker=markers.get(group, "o"),
                    linewidth=1.5,
                    elinewidth=0.6,
                    capsize=2,
                    alpha=0.85,
                )
    axes.axhline(1, color=_colour(REFERENCE), linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens (or images) per step on each rank")
    axes.set_ylabel("times as fast as eager")
    for name in names:
        axes.plot([], [], color=_colour(name), linewidth=3, label=name)
    for (name, dtype), marker in markers.items():
        axes.plot([], [], color="white", marker=marker, markerfacecolor=_OTHER,
                  markeredgecolor=_OTHER, label=f"{name} {dtype}")  # fmt: skip
    axes.grid(visible=True, which="major", linewidth=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def bars(result: BenchResult) -> Any:
    """Draw the median time of a step of each contender, a row of bars for each case."""
    columns = min(3, len(result.cases))
    rows = -(-len(result.cases) // columns)
    names = _ran(result.cases)
    figure = _figure(figsize=(4.2 * columns, 0.7 + rows * (0.6 + 0.24 * len(names))))
    for index, case in enumerate(result.cases):
        axes = figure.add_subplot(rows, columns, index + 1)
        found = [(own.name, own.timing.steps) for own in case.contenders]
        found.sort(key=lambda pair: names.index(pair[0]))
        places = range(len(found))
        axes.barh(
            places,
            [steps.median for _, steps in found],
            xerr=(
                [steps.median - steps.p5 for _, steps in found],
                [steps.p95 - steps.median for _, steps in found],
            ),
            color=[_colour(name) for name, _ in found],
            error_kw={"elinewidth": 0.8, "capsize": 2, "ecolor": "#333333"},
        )
        axes.set_yticks(places, [name for name, _ in found], fontsize=8)
        axes.invert_yaxis()
        axes.set_title(workload_text(case.workload), fontsize=9)
        axes.set_xlabel("ms per step: median, 5 % to 95 %", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def distributions(result: BenchResult) -> Any:
    """Draw for each case which share of the steps took at most how long."""
    columns = min(3, len(result.cases))
    rows = -(-len(result.cases) // columns)
    figure = _figure(figsize=(4.2 * columns, 0.6 + 2.8 * rows))
    for index, case in enumerate(result.cases):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw_shares(axes, case)
        axes.set_title(workload_text(case.workload), fontsize=9)
        axes.set_xlabel("ms per step", fontsize=8)
        axes.set_ylabel("share of the steps", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, linewidth=0.3)
    for name in _ran(result.cases):
        figure.axes[0].plot([], [], color=_colour(name), linewidth=3, label=name)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def memory(result: BenchResult) -> Any:
    """Draw the peak memory of each contender; None where none was measured."""
    cases = [case for case in result.cases if any(own.memory for own in case.contenders)]
    if not cases:
        return None
    names = _ran(cases)
    figure = _figure(
        figsize=(5.2 * min(2, len(cases)), 0.8 + 0.3 * len(names) * -(-len(cases) // 2))
    )
    for index, case in enumerate(cases):
        axes = figure.add_subplot(-(-len(cases) // 2), min(2, len(cases)), index + 1)
        found = [(own.name, own.memory) for own in case.contenders if own.memory is not None]
        on_gpu = any(record.allocated_bytes is not None for _, record in found)
        outer = [(m.reserved_bytes if on_gpu else m.process_bytes) or 0 for _, m in found]
        inner = [(m.allocated_bytes if on_gpu else m.steps_bytes) or 0 for _, m in found]
        places = range(len(found))
        colours = [_colour(name) for name, _ in found]
        axes.barh(places, [value / 2**20 for value in outer], color=colours, alpha=0.4)
        axes.barh(places, [value / 2**20 for value in inner], color=colours, height=0.4)
        axes.set_yticks(places, [name for name, _ in found], fontsize=8)
        axes.invert_yaxis()
        what = (
            "MiB; thin: allocated, wide: reserved"
            if on_gpu
            else "MiB; wide: whole process, thin: later steps without the libraries"
        )
        axes.set_xlabel(what, fontsize=8)
        axes.set_title(f"peak memory, {workload_text(case.workload)}", fontsize=9)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_shares(axes: "Axes", case: CaseResult) -> None:
    slowest = 0.0
    for own in case.contenders:
        times = sorted(step for window in own.timing.step_ms for step in window)
        shares = [(index + 1) / len(times) for index in range(len(times))]
        axes.step(times, shares, where="post", color=_colour(own.name), linewidth=1.2)
        slowest = max(slowest, min(own.timing.steps.p95, 3 * own.timing.steps.median))
    # A few outliers would squeeze everything else to the left.
    axes.set_xlim(0, slowest * 1.2)


def _ran(cases: Sequence[CaseResult]) -> list[str]:
    """Return the contenders with numbers, in the order of the colours."""
    order = [name for name, _ in _COLOURS]
    found = {own.name for case in cases for own in case.contenders}
    known = [name for name in order if name in found]
    return known + [name for name in contender_names(cases) if name in found - set(known)]


def _colour(name: str) -> str:
    return dict(_COLOURS).get(name, _OTHER)


def _figure(*, figsize: tuple[float, float]) -> Any:
    """Return matplotlib's Figure: not pyplot, so no window system and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=figsize, dpi=120, layout="constrained")
