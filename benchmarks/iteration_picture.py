"""Draws one iteration before and after its capture: docs/pictures/iteration.svg.

``python -m benchmarks.iteration_picture`` trains a small GPT on this CPU in a plain loop and in a
captured one, in turns. The operators of each row are those of torch's profiler; the length of a row
is the median without it, since it makes whatever it looks at slower.
"""

import itertools
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.rows import CPU
from graphfsdp.bench.contenders import Contender, Setting, Window, own_contender, torch_loop
from graphfsdp.bench.measure import in_turns, time_window
from graphfsdp.bench.results import environment_text, find_environment
from graphfsdp.bench.workloads import ROWS, TOKENS, Case, batch_source
from graphfsdp.config import Scope
from graphfsdp.data import Batch
from graphfsdp.training.ranks import Ranks

PICTURE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "pictures" / "iteration.svg"
PHASES = ("forward", "backward", "optimizer")
COLOURS = ("#3b7dd8", "#d9822b", "#2e8b57")
WIDTH, LEFT, TOP, HEIGHT, GAP = 860, 20, 70, 44, 34
ROUNDS, STEPS, NUM_BATCHES = 40, 10, 10


class Operator(NamedTuple):
    start: float  # in shares of the iteration
    end: float
    phase: str


class Row(NamedTuple):
    title: str
    ms: float  # the median of an iteration without a profiler
    operators: Sequence[Operator]


def is_operator(event: FunctionEvent | None) -> bool:
    return event is not None and event.name.startswith(("aten::", "graphfsdp::"))


def is_outermost(event: FunctionEvent) -> bool:
    """Tell an operator that no other one has called."""
    parent = event.cpu_parent
    while parent is not None and not is_operator(parent):
        parent = parent.cpu_parent
    return is_operator(event) and parent is None


def profiled(contender: Contender, batches: Iterable[Batch]) -> list[Operator]:
    """Return the outermost operators of an iteration of median length.

    A phase is an operator's name until it is known; of a loop, autograd's engine tells them apart.
    """
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for batch in batches:
            with record_function("iteration"):
                contender.train(batch)
    events = list(found.events() or ())
    iterations = sorted(
        (event for event in events if event.name == "iteration"),
        key=lambda event: event.time_range.elapsed_us(),
    )
    whole = iterations[len(iterations) // 2].time_range
    inside = [each for each in events if whole.start <= each.time_range.start < whole.end]
    backward = [each.time_range for each in inside if each.name.startswith("autograd::engine")]
    operators = []
    for event in filter(is_outermost, inside):
        start, end = event.time_range.start, event.time_range.end
        phase = event.name
        if backward:
            began, ended = min(e.start for e in backward), max(e.end for e in backward)
            phase = PHASES[(start >= began) + (start > ended)]
        length = whole.elapsed_us()
        operators.append(
            Operator((start - whole.start) / length, (end - whole.start) / length, phase)
        )
    return sorted(operators)


def with_phases(operators: Iterable[Operator], nodes: Sequence[tuple[str, str]]) -> list[Operator]:
    """Give the operators of a replay, whose phases hold names, those of the recording's nodes."""
    place, phase, result = 0, PHASES[0], []
    for operator in operators:
        name = operator.phase.partition("::")[2]
        for index, (node, its_phase) in enumerate(nodes[place : place + 12], place):
            if node == name:
                place, phase = index + 1, its_phase
                break
        result.append(operator._replace(phase=phase))
    return result


def measure() -> tuple[list[Row], str]:
    case = Case("zoo-gpt", "fp32", ROWS)
    setting, source = Setting(case, CPU), batch_source(case, CPU, Ranks())
    plain, ours = torch_loop(setting), own_contender(setting, Scope.FULL_ITERATION)
    environment = find_environment(CPU)
    batches = [*map(source, range(NUM_BATCHES))]
    turn = itertools.cycle(batches)

    def window(contender: Contender) -> Callable[[], Window]:
        return lambda: time_window([lambda: contender.train(next(turn))] * STEPS, CPU)

    windows = in_turns({"plain": window(plain), "ours": window(ours)}, range(ROUNDS))
    ms = {  # the first ones are warm-ups
        name: statistics.median(step for each in found[1:] for step in each.step_ms)
        for name, found in windows.items()
    }
    assert ours.captured is not None
    nodes = [
        (node.op.split(".")[1], node.site.phase.value)
        for node in ours.captured.report().nodes()
        if node.called
    ]
    loop, replay = (profiled(contender, batches) for contender in (plain, ours))
    ours.close()
    rows = [
        Row("a plain PyTorch loop", ms["plain"], loop),
        Row("the same iteration, captured: one call", ms["ours"], with_phases(replay, nodes)),
    ]
    what = f"GPT of 4 layers, width 32, {ROWS} x {TOKENS} tokens, float32, AdamW, clipping"
    return rows, f"Milliseconds. {what}.\n{environment_text(environment)}"


def svg(rows: Sequence[Row], caption: str) -> str:
    longest = max(row.ms for row in rows)
    scale = (WIDTH - 2 * LEFT) / longest
    height = TOP + len(rows) * (HEIGHT + GAP) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13" fill="#222">',
        "<title>One training iteration before and after its capture</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    place = LEFT
    names = (*PHASES[:2], "clipping and optimizer", "no operator runs: Python, dispatch")
    for colour, name in zip((*COLOURS, "#e9e9e9"), names, strict=True):
        lines.append(f'<rect x="{place}" y="14" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{place + 18}" y="25">{name}</text>')
        place += 40 + 8 * len(name)
    for index, row in enumerate(rows):
        top = TOP + index * (HEIGHT + GAP)
        length = row.ms * scale
        busy = sum(operator.end - operator.start for operator in row.operators)
        title = f"{row.title}: {row.ms:.2f} ms, in operators {busy:.0%} of it"
        lines.append(f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>')
        lines.append(
            f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{HEIGHT}" fill="#e9e9e9"/>'
        )
        for phase, colour in zip(PHASES, COLOURS, strict=True):
            path = "".join(
                f"M{LEFT + operator.start * length:.1f} {top}"
                f"h{max((operator.end - operator.start) * length, 0.3):.1f}v{HEIGHT}"
                f"H{LEFT + operator.start * length:.1f}z"
                for operator in row.operators
                if operator.phase == phase
            )
            lines.append(f'<path fill="{colour}" d="{path}"/>')
    bottom = TOP + len(rows) * (HEIGHT + GAP) - GAP + 20
    for number, line in enumerate(caption.split("\n"), 1):
        y = bottom - 16 + 16 * number
        lines.append(f'<text x="{LEFT}" y="{y}" font-size="11">{escape(line)}</text>')
    return "\n".join((*lines, "</svg>", ""))


if __name__ == "__main__":
    torch.set_num_threads(1)
    PICTURE.write_text(svg(*measure()), encoding="utf-8")
