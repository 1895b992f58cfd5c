"""Timing: contenders take turns in short windows, so that a slow minute hits them all."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from graphfsdp.base.collector import without_collector

T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """Milliseconds per step; the CPU's of all threads."""

    step_ms: tuple[float, ...]
    cpu_ms: float

    @property
    def mean_ms(self) -> float:
        return sum(self.step_ms) / len(self.step_ms)


def time_window(steps: Sequence[Callable[[], object]], device: torch.device) -> Window:
    """No host sync between the steps: on a GPU an event after each of them marks its end.

    The event before the first step is recorded on an idle GPU.
    """
    events: list[torch.cuda.Event] = []
    marks = [0] * (len(steps) + 1)
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in marks]
        torch.cuda.synchronize(device)
        events[0].record()
    cpu_start = time.process_time_ns()
    marks[0] = time.perf_counter_ns()
    for index, step in enumerate(steps, start=1):
        step()
        if events:
            events[index].record()
        marks[index] = time.perf_counter_ns()
    cpu_ns = time.process_time_ns() - cpu_start
    step_ms = [(end - start) / 1e6 for start, end in itertools.pairwise(marks)]
    if events:
        events[-1].synchronize()
        step_ms = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    rounded = tuple(float(f"{value:.6g}") for value in step_ms)
    return Window(rounded, cpu_ns / 1e6 / len(steps))


def in_turns(
    measures: Mapping[str, Callable[[], T]], rounds: Iterable[object]
) -> dict[str, list[T]]:
    """The order turns round after each round, so that nobody always follows the same neighbour."""
    found: dict[str, list[T]] = {name: [] for name in measures}
    order = list(measures)
    for _ in rounds:
        with without_collector():
            for name in order:
                found[name].append(measures[name]())
        order.reverse()
    return found


MIN_ROUNDS, MAX_ROUNDS = 5, 100
_MIN_STEPS, _MAX_STEPS = 2, 50
_WINDOW_MS = 40.0


def make_schedule(step_ms: Sequence[float], seconds: float) -> tuple[int, int]:
    """Return how many rounds fit into a time, and steps into a window.

    ``step_ms`` says how long a step of each contender takes. A window has several steps, since its
    first one finds its neighbour's data in the caches, and is long beside the clock's own cost.
    There are enough rounds to see how the ratio scatters.
    """
    all_ms = sum(step_ms)
    num_steps = round(_WINDOW_MS / min(step_ms))
    num_steps = min(num_steps, int(seconds * 1e3 / (2 * MIN_ROUNDS * all_ms)), _MAX_STEPS)
    num_steps = max(num_steps, _MIN_STEPS)
    num_rounds = int(seconds * 1e3 / (num_steps * all_ms))
    return min(max(num_rounds, MIN_ROUNDS), MAX_ROUNDS), num_steps
