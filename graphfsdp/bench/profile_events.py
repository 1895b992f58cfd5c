"""Sums over the events of a Chrome trace: largest kernels, gaps between them, named stretches.

On a GPU kernels, copies and fills count; on a CPU operators, those that other operators call
being part of them. What Python, autograd or compiled code does around them is a gap.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphfsdp.base.nvtx import RANGE_PREFIX
from graphfsdp.bench.profile_records import NUM_LARGEST, Gap, KernelTotal, RangeTotal

STEP = "graphfsdp bench: step"
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLERS = (RANGE_PREFIX, "autograd::", "torch::autograd::")
# Shorter ones are the clock's resolution, and the driver's between two kernels of a graph.
_SHORTEST_GAP_US = 0.01


@dataclass(frozen=True)
class Event:
    """A complete event of a Chrome trace.

    Attributes:
        start: Microseconds.
        end: Microseconds.
        thread: Where it ran.
        correlation: Number of the launch that a GPU's event belongs to; None without.
    """

    name: str
    category: str
    start: float
    end: float
    thread: tuple[object, object]
    correlation: int | None = None

    @property
    def us(self) -> float:
        """How long it lasted."""
        return self.end - self.start


def events_of(trace: Mapping[str, Any]) -> list[Event]:
    """Return the complete events, in order of time, an outer one before its inner ones."""
    found = []
    for data in trace["traceEvents"]:
        if data.get("ph") != "X" or "cat" not in data:
            continue
        start = float(data["ts"])
        arguments = data.get("args", {})
        found.append(
            Event(
                name=str(data["name"]),
                category=data["cat"],
                start=start,
                end=start + float(data.get("dur", 0.0)),
                thread=(data.get("pid"), data.get("tid")),
                correlation=arguments.get("correlation"),
            )
        )
    return sorted(found, key=lambda event: (event.start, -event.end))


def is_operator(event: Event) -> bool:
    """Return whether it is an operator, not what calls operators: autograd, a module, a range."""
    if event.category != "cpu_op" or event.name.startswith(_CALLERS):
        return False
    return "::" in event.name or "cpp_fused" in event.name


def is_range(event: Event) -> bool:
    """Return whether somebody named this stretch of the host's time."""
    return event.name.startswith(RANGE_PREFIX) or (
        event.category == "user_annotation" and event.name != STEP
    )


def kernels_of(events: Sequence[Event]) -> list[Event]:
    """Return a GPU's kernels, copies and fills, or all operators where there is none of them."""
    on_device = [event for event in events if event.category in DEVICE_CATEGORIES]
    return on_device or [event for event in events if is_operator(event)]


def outermost(events: Iterable[Event]) -> list[Event]:
    """Return the events that lie in no other one of their thread."""
    ends: dict[object, float] = {}
    found = []
    for event in events:
        if event.start >= ends.get(event.thread, float("-inf")):
            found.append(event)
            ends[event.thread] = event.end
    return found


def steps_of(events: Sequence[Event]) -> list[Event]:
    """Return the steps, as the host saw them."""
    return [e for e in events if e.name == STEP and e.category == "user_annotation"]


def window_of(events: Sequence[Event]) -> tuple[float, float]:
    """Return when the first step began and the last one was over, on the GPU too."""
    steps = steps_of(events)
    ends = [event.end for event in events if event.category in DEVICE_CATEGORIES]
    return steps[0].start, max([steps[-1].end, *ends])


def largest(kernels: Sequence[Event], num_steps: int, step_us: float) -> tuple[KernelTotal, ...]:
    """Return the names that take most time, each without what it calls in turn."""
    times, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    open_events: dict[object, list[Event]] = defaultdict(list)
    for event in kernels:
        callers = open_events[event.thread]
        while callers and callers[-1].end <= event.start:
            callers.pop()
        # Kernels of two streams lie beside each other, not in each other.
        if callers and event.category == "cpu_op":
            times[callers[-1].name] -= event.us
        callers.append(event)
        times[event.name] += event.us
        calls[event.name] += 1
    ordered = sorted(times, key=lambda name: -times[name])[:NUM_LARGEST]
    return tuple(
        KernelTotal(
            name=name,
            ms=times[name] / num_steps / 1e3,
            calls=calls[name] / num_steps,
            share=times[name] / num_steps / step_us if step_us else 0.0,
        )
        for name in ordered
    )


@dataclass(frozen=True)
class _Busy:
    start: float
    end: float
    first: str
    last: str


def _busy(kernels: Sequence[Event], window: tuple[float, float]) -> list[_Busy]:
    """Return the stretches in which something ran, all threads and streams together."""
    found: list[_Busy] = []
    for event in kernels:
        start, end = max(event.start, window[0]), min(event.end, window[1])
        if end < start:
            continue
        if found and start <= found[-1].end:
            before = found.pop()
            last = event.name if end > before.end else before.last
            found.append(_Busy(before.start, max(before.end, end), before.first, last))
        else:
            found.append(_Busy(start, end, event.name, event.name))
    return found


def busy_us(kernels: Sequence[Event], window: tuple[float, float]) -> float:
    """Return how long at least one of them ran."""
    return sum(stretch.end - stretch.start for stretch in _busy(kernels, window))


def gaps(
    kernels: Sequence[Event], ranges: Sequence[Event], window: tuple[float, float]
) -> list[Gap]:
    """Return the stretches in which none of them ran, the longest first."""
    begin, end = _Busy(window[0], window[0], "", ""), _Busy(window[1], window[1], "", "")
    found = []
    for before, after in itertools.pairwise([begin, *_busy(kernels, window), end]):
        if after.start - before.end > _SHORTEST_GAP_US:
            within = _innermost(ranges, before.end, after.start)
            found.append(Gap((after.start - before.end) / 1e3, before.last, after.first, within))
    return sorted(found, key=lambda gap: -gap.ms)


def _innermost(ranges: Sequence[Event], start: float, end: float) -> str:
    middle = (start + end) / 2
    around = [event for event in ranges if event.start <= middle < event.end]
    return range_name(min(around, key=lambda event: event.us)) if around else ""


def range_name(event: Event) -> str:
    """Return the name without what marks it as ours."""
    name = event.name.removeprefix(RANGE_PREFIX)
    return f"{name}(root)" if name.endswith(" ") else name  # the outermost unit has no name


def range_totals(ranges: Sequence[Event], num_steps: int) -> tuple[RangeTotal, ...]:
    """Return the named stretches, the longest first."""
    times, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in ranges:
        times[range_name(event)] += event.us
        calls[range_name(event)] += 1
    ordered = sorted(times, key=lambda name: -times[name])
    return tuple(
        RangeTotal(name, times[name] / num_steps / 1e3, calls[name] / num_steps) for name in ordered
    )
