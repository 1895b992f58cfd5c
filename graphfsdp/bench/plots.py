"""The plot of a result, drawn with matplotlib where it is installed."""

import importlib.util
from pathlib import Path

from graphfsdp.bench.records import REFERENCE, BenchResult, CaseResult
from graphfsdp.bench.tables import contender_names

PLOT = "crossover.png"


def draw(result: BenchResult, folder: Path) -> list[Path]:
    """Draw speed over tokens per step; nothing where matplotlib is not installed.

    Lines join the batch sizes of one workload; bars go from the least to the greatest pair.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return []
    # matplotlib's Figure, not pyplot: no window system and no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    ran = [
        name for name in contender_names(result.cases) if any(c.find(name) for c in result.cases)
    ]
    colours = {name: f"C{index}" for index, name in enumerate(ran)}
    names = [name for name in ran if name != REFERENCE]
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
    axes.set_xlabel("tokens (or samples) per step on each rank")
    axes.set_ylabel("times as fast as eager")
    for name in names:
        axes.plot([], [], color=colours[name], linewidth=3, label=name)
    for (name, dtype), marker in markers.items():
        axes.plot([], [], color="#888888", linewidth=0, marker=marker, label=f"{name} {dtype}")
    axes.grid(visible=True, which="major", linewidth=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(folder / PLOT)
    return [folder / PLOT]
