"""Draws one iteration before and after its capture: docs/pictures/iteration.svg.

``python -m benchmarks.iteration_picture`` trains a small GPT on this CPU in a plain loop and in a
captured one, in turns. The operators of each row are those of torch's profiler; the length of a row
is the median without it, since it makes whatever it looks at slower.
"""

import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import graphfsdp
from graphfsdp.bench.machine import find_environment
from graphfsdp.bench.results import environment_text
from graphfsdp.bench.zoo import ROWS, TOKENS, architectures
from graphfsdp.optim import FusedAdam

PICTURE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "pictures" / "iteration.svg"
PHASES = ("forward", "backward", "optimizer")
COLOURS = ("#3b7dd8", "#d9822b", "#2e8b57")
WIDTH, LEFT, TOP, HEIGHT, GAP = 860, 20, 70, 44, 34
ROUNDS, STEPS = 40, 10
Step = Callable[[tuple[Tensor, ...]], object]


class Operator(NamedTuple):
    start: float  # in shares of the iteration
    end: float
    phase: str


class Row(NamedTuple):
    title: str
    ms: float  # the median of an iteration without a profiler
    operators: Sequence[Operator]


def plain_step(model: torch.nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch: tuple[Tensor, ...]) -> object:
        with record_function("iteration"):
            with record_function("forward"):
                loss = model(*batch)
            with record_function("backward"):
                optimizer.zero_grad()
                loss.backward()
            with record_function("optimizer"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return loss

    return step


def captured_step(model: torch.nn.Module) -> tuple[Step, graphfsdp.CapturedStep]:
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    captured = graphfsdp.capture(model, optimizer, max_grad_norm=1.0)

    def step(batch: tuple[Tensor, ...]) -> object:
        with record_function("iteration"):
            return captured(*batch)

    return step, captured


def milliseconds(step: Step, batches: Iterable[tuple[Tensor, ...]]) -> list[float]:
    times = []
    for batch in batches:
        before = time.perf_counter()
        step(batch)
        times.append((time.perf_counter() - before) * 1e3)
    return times


def is_operator(event: FunctionEvent) -> bool:
    return event.name.startswith(("aten::", "graphfsdp::"))


def parents(event: FunctionEvent) -> Iterator[FunctionEvent]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def profiled(step: Step, batches: Iterable[tuple[Tensor, ...]]) -> list[Operator]:
    """Return the operators that no other one has called, of an iteration of median length."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for batch in batches:
            step(batch)
    events = list(found.events() or ())
    iterations = sorted(
        (event for event in events if event.name == "iteration"),
        key=lambda event: event.time_range.elapsed_us(),
    )
    whole = iterations[len(iterations) // 2]
    length = whole.time_range.elapsed_us()
    operators = []
    for event in events:
        above = list(parents(event)) if is_operator(event) else []
        if whole not in above or any(map(is_operator, above)):
            continue
        phase = next((outer.name for outer in above if outer.name in PHASES), event.name)
        start, end = event.time_range.start, event.time_range.end
        begin = whole.time_range.start
        operators.append(Operator((start - begin) / length, (end - begin) / length, phase))
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


def measure(device: torch.device) -> tuple[list[Row], str]:
    architecture = architectures()["gpt"]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    plain = plain_step(architecture.make())
    replay, captured = captured_step(architecture.make())

    def batches() -> list[tuple[Tensor, ...]]:
        return [architecture.batch(generator, ROWS) for _ in range(STEPS)]

    times: dict[Step, list[float]] = {plain: [], replay: []}
    for step in (plain, replay):
        milliseconds(step, batches())  # warm-ups, and the capture
    environment = find_environment(device)
    for number in range(ROUNDS):
        for step in (plain, replay) if number % 2 else (replay, plain):
            times[step] += milliseconds(step, batches())
    nodes = [
        (node.op.split(".")[1], node.site.phase.value)
        for node in captured.report().nodes()
        if node.called
    ]
    rows = [
        Row("a plain PyTorch loop", statistics.median(times[plain]), profiled(plain, batches())),
        Row(
            "the same iteration, captured: one call",
            statistics.median(times[replay]),
            with_phases(profiled(replay, batches()), nodes),
        ),
    ]
    captured.close()
    what = f"GPT of 4 layers, width 32, {ROWS} x {TOKENS} tokens, float32, AdamW, clipping"
    return rows, f"Milliseconds. {what}.\n{environment_text(environment)}"


def svg(rows: Sequence[Row], caption: str) -> str:
    longest = max(row.ms for row in rows)
    scale = (WIDTH - 2 * LEFT) / longest
    height = TOP + len(rows) * (HEIGHT + GAP) + 34
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
    step = next(size for size in (0.1, 0.2, 0.5, 1, 2, 5, 10, 50, 1e9) if longest / size < 12)
    for tick in range(int(longest / step) + 1):
        x = LEFT + tick * step * scale
        lines.append(
            f'<text x="{x:.1f}" y="{bottom}" font-size="11" fill="#777" '
            f'text-anchor="middle">{tick * step:g}</text>'
        )
    for number, line in enumerate(caption.split("\n"), 1):
        y = bottom + 6 + 16 * number
        lines.append(f'<text x="{LEFT}" y="{y}" font-size="11">{escape(line)}</text>')
    return "\n".join((*lines, "</svg>", ""))


def main() -> int:
    torch.set_num_threads(1)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg(*measure(torch.device("cpu"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
