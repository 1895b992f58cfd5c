"""Plots of a result, drawn with matplotlib where it is installed."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphfsdp.bench.records import REFERENCE, BenchResult, CaseResult
from graphfsdp.bench.tables import contender_names, workload_text


def draw_all(result: BenchResult, folder: Path) -> list[Path]:
    """Draw every plot that the result has numbers for; none where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None or not result.cases:
        return []
    plots: Mapping[str, Callable[[BenchResult], Any]] = {
        "crossover.png": crossover,
        "step_ms.png": step_times,
        "distribution.png": distributions,
        "memory.png": memory,
    }
    drawn = []
    for name, draw in plots.items():
        figure = draw(result)
        if figure is not None:
            figure.savefig(folder / name)
            drawn.append(folder / name)
    return drawn


def crossover(result: BenchResult) -> Any:
    """Lines join the batch sizes of one workload; bars go from the least to the greatest pair."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    colours = _colours(result.cases)
    names = [name for name in colours if name != REFERENCE]
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
                below = [spread.median - spread.minimum for _, spread in points]
                above = [spread.maximum - spread.median for _, spread in points]
                axes.errorbar(
                    [items for items, _ in points],
                    [spread.median for _, spread in points],
                    yerr=(below, above),
                    color=colours[name],
                    marker=markers.get(group, "o"),
                    linewidth=1.5,
                    elinewidth=0.6,
                    capsize=2,
                    alpha=0.85,
                )
    axes.axhline(1, color=colours[REFERENCE], linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens (or images) per step on each rank")
    axes.set_ylabel("times as fast as eager")
    for name in names:
        axes.plot([], [], color=colours[name], linewidth=3, label=name)
    for (name, dtype), marker in markers.items():
        axes.plot([], [], color="#888888", linewidth=0, marker=marker, label=f"{name} {dtype}")
    axes.grid(visible=True, which="major", linewidth=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def step_times(result: BenchResult) -> Any:
    colours = _colours(result.cases)
    figure, panels = _panels(result.cases, 0.6 + 0.24 * len(colours))
    for axes, case in panels:
        found = {own.name: own.timing.steps for own in case.contenders}
        axes.barh(
            list(found),
            [steps.median for steps in found.values()],
            xerr=(
                [steps.median - steps.p5 for steps in found.values()],
                [steps.p95 - steps.median for steps in found.values()],
            ),
            color=[colours[name] for name in found],
            error_kw={"elinewidth": 0.8, "capsize": 2, "ecolor": "#333333"},
        )
        axes.invert_yaxis()
        axes.set_xlabel("ms per step: median, 5 % to 95 %", fontsize=8)
    return figure


def distributions(result: BenchResult) -> Any:
    """Draw for each case which share of the steps took at most how long."""
    colours = _colours(result.cases)
    figure, panels = _panels(result.cases, 2.8)
    for axes, case in panels:
        slowest = 0.0
        for own in case.contenders:
            times = [step for window in own.timing.step_ms for step in window]
            axes.ecdf(times, color=colours[own.name], linewidth=1.2)
            slowest = max(slowest, min(own.timing.steps.p95, 3 * own.timing.steps.median))
        axes.set_xlim(0, slowest * 1.2)  # a few outliers would squeeze everything to the left
        axes.set_xlabel("ms per step", fontsize=8)
        axes.set_ylabel("share of the steps", fontsize=8)
        axes.grid(visible=True, linewidth=0.3)
    for name, colour in colours.items():
        figure.axes[0].plot([], [], color=colour, linewidth=3, label=name)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def memory(result: BenchResult) -> Any:
    """None where none was measured."""
    cases = [case for case in result.cases if any(own.memory for own in case.contenders)]
    if not cases:
        return None
    colours = _colours(cases)
    figure, panels = _panels(cases, 0.6 + 0.24 * len(colours))
    for axes, case in panels:
        found = {own.name: own.memory for own in case.contenders if own.memory is not None}
        on_gpu = any(record.allocated_bytes is not None for record in found.values())
        outer = [(m.reserved_bytes if on_gpu else m.process_bytes) or 0 for m in found.values()]
        inner = [(m.allocated_bytes if on_gpu else m.steps_bytes) or 0 for m in found.values()]
        bars = [colours[name] for name in found]
        axes.barh(list(found), [value / 2**20 for value in outer], color=bars, alpha=0.4)
        axes.barh(list(found), [value / 2**20 for value in inner], color=bars, height=0.4)
        axes.invert_yaxis()
        what = "allocated, wide: reserved" if on_gpu else "later steps alone, wide: whole process"
        axes.set_xlabel(f"peak memory, MiB; thin: {what}", fontsize=8)
    return figure


def _colours(cases: Sequence[CaseResult]) -> dict[str, str]:
    names = [name for name in contender_names(cases) if any(case.find(name) for case in cases)]
    return {name: f"C{index}" for index, name in enumerate(names)}


def _panels(cases: Sequence[CaseResult], height: float) -> tuple[Any, list[tuple[Any, CaseResult]]]:
    """Three in a row of that height in inches."""
    # matplotlib's Figure, not pyplot: no window system and no global state.
    from matplotlib.figure import Figure

    columns = min(3, len(cases))
    rows = -(-len(cases) // columns)
    size = (4.2 * columns, 0.7 + height * rows)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panels = []
    for index, case in enumerate(cases):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_title(workload_text(case.workload), fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        panels.append((axes, case))
    return figure, panels
