"""Profiles of contenders: a Chrome trace for each, its largest kernels, gaps and phases."""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from graphfsdp.base.nvtx import RANGE_PREFIX
from graphfsdp.bench.records import to_json
from graphfsdp.bench.timeline import (
    STEP,
    Event,
    GraphNode,
    events_of,
    is_range,
    kernels_of,
    name_replays,
    outermost,
    steps_of,
    window_of,
)

NUM_LARGEST = 10
_MAX_NAME = 100  # in text: templates of C++ have names of thousands of characters
# Shorter ones are the clock's resolution, and the driver's between two kernels of a graph.
_SHORTEST_GAP_US = 0.01
_NOT_NAMED = (
    "the events of a replay cannot be told apart, so the timeline has no phases and modules of "
    "graph replays"
)
_COMPILED = (
    "code that torch.compile made for a CPU is no operator, so the time that it runs is in the gaps"
)


@dataclass(frozen=True)
class KernelTotal:
    """All kernels, copies, fills or operators of a name, per step, without what they call."""

    name: str
    ms: float
    calls: float
    share: float


@dataclass(frozen=True)
class Gap:
    """A stretch of a step in which no kernel (GPU) or operator (CPU) ran.

    ``within`` is the innermost named stretch of the host at its start, empty outside of all.
    """

    ms: float
    after: str
    before: str
    within: str


@dataclass(frozen=True)
class RangeTotal:
    """A named stretch of the host's time, per step: a phase, or a unit's gathering and reducing."""

    name: str
    ms: float
    calls: float


@dataclass(frozen=True)
class ProfileRecord:
    """Some steps of one contender under torch's profiler, which slows the host down.

    Counts and milliseconds are per step; in ``busy_ms`` at least one kernel or operator ran.
    ``num_named`` counts events of graph replays to which the trace gives phase and module.
    """

    case: str
    contender: str
    what: str
    num_steps: int
    step_ms: float
    busy_ms: float
    num_kernels: float
    largest: tuple[KernelTotal, ...]
    num_gaps: float
    gaps: tuple[Gap, ...]
    ranges: tuple[RangeTotal, ...]
    trace: str
    num_named: int = 0
    notes: tuple[str, ...] = ()

    @property
    def gap_ms(self) -> float:
        return max(self.step_ms - self.busy_ms, 0.0)


def describe_profile(record: ProfileRecord) -> str:
    share = record.busy_ms / record.step_ms if record.step_ms else 0.0
    lines = [
        f"{record.contender}, {record.case}: {record.num_steps} steps of {record.step_ms:.3f} ms "
        "under the profiler",
        f"  {record.what} ran {record.busy_ms:.3f} ms of a step ({share:.0%}), gaps "
        f"{record.gap_ms:.3f} ms; {record.num_kernels:.0f} {record.what}, "
        f"{record.num_gaps:.0f} gaps",
        f"  largest {record.what}:",
        "        ms  share  calls  name",
    ]
    lines += [
        f"  {item.ms:8.3f}  {item.share:5.1%}  {item.calls:5.0f}  {_short(item.name)}"
        for item in record.largest
    ]
    lines.append("  longest gaps:")
    lines += [
        f"  {gap.ms:8.3f}  after {_short(gap.after) or 'nothing'}, before "
        f"{_short(gap.before) or 'nothing'}" + (f", in {gap.within}" if gap.within else "")
        for gap in record.gaps
    ]
    lines.append("  phases and units:" if record.ranges else "  no phases: not our own code")
    lines += [f"  {item.ms:8.3f}  {item.calls:5.0f}x  {item.name}" for item in record.ranges]
    lines += [f"  note: {note}" for note in record.notes]
    lines.append(f"  timeline: {record.trace} (chrome://tracing or https://ui.perfetto.dev)")
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 3] + "..."


def profile_contender(
    steps: Sequence[Callable[[], object]],
    *,
    case: str,
    contender: str,
    device: torch.device,
    folder: Path,
    nodes: Sequence[GraphNode] = (),
) -> ProfileRecord:
    """Run some steps under torch's profiler; the first one only gets the profiler itself started.

    The folder exists, and gets CONTENDER.trace.json, .txt and .json.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # acc_events: torch 2.11 warns of a second profile in a process otherwise.
    with profile(activities=activities, acc_events=True):
        steps[0]()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        for step in steps[1:]:
            with record_function(STEP):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    name = f"{contender}.trace.json"
    profiler.export_chrome_trace(str(folder / name))
    trace = json.loads((folder / name).read_text(encoding="utf-8"))
    record = summarise(trace, case=case, contender=contender, trace_name=name, nodes=nodes)
    (folder / name).write_text(json.dumps(trace), encoding="utf-8")
    (folder / f"{contender}.json").write_text(to_json(record), encoding="utf-8")
    (folder / f"{contender}.txt").write_text(describe_profile(record), encoding="utf-8")
    return record


def summarise(
    trace: dict[str, Any],
    *,
    case: str,
    contender: str,
    trace_name: str,
    nodes: Sequence[GraphNode] = (),
) -> ProfileRecord:
    """Return what a trace says, and give the replays in it their names."""
    events = events_of(trace)
    num_steps = len(steps_of(events))
    window = window_of(events)
    kernels, ranges = kernels_of(events), [event for event in events if is_range(event)]
    on_cpu = bool(kernels) and kernels[0].category == "cpu_op"
    step_us = (window[1] - window[0]) / num_steps
    found = gaps(kernels, ranges, window)
    num_named = name_replays(trace, events, nodes)
    notes = []
    if nodes and not num_named:
        notes.append(_NOT_NAMED)
    if on_cpu and any("Torch-Compiled Region" in event.name for event in events):
        notes.append(_COMPILED)
    return ProfileRecord(
        case=case,
        contender=contender,
        what="operators" if on_cpu else "kernels",
        num_steps=num_steps,
        step_ms=step_us / 1e3,
        busy_ms=busy_us(kernels, window) / num_steps / 1e3,
        num_kernels=len(outermost(kernels) if on_cpu else kernels) / num_steps,
        largest=largest(kernels, num_steps, step_us),
        num_gaps=len(found) / num_steps,
        gaps=tuple(found[:NUM_LARGEST]),
        ranges=range_totals(ranges, num_steps),
        trace=trace_name,
        num_named=num_named,
        notes=tuple(notes),
    )


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
    times, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in ranges:
        times[range_name(event)] += event.us
        calls[range_name(event)] += 1
    ordered = sorted(times, key=lambda name: -times[name])
    return tuple(
        RangeTotal(name, times[name] / num_steps / 1e3, calls[name] / num_steps) for name in ordered
    )
