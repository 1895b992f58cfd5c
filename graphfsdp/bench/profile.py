"""Profiles of contenders: a Chrome trace for each, its largest kernels, gaps and phases."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from graphfsdp.base.nvtx import RANGE_PREFIX
from graphfsdp.bench.machine import profiled
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
class Total:
    """All that has a name, per step: kernels, copies, fills or operators, without what they call.

    Or named stretches of the host's time: a phase, or a unit's gathering and reducing.
    """

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
    largest: tuple[Total, ...]
    num_gaps: float
    gaps: tuple[Gap, ...]
    ranges: tuple[Total, ...]
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
    with profiled(device):
        steps[0]()
    with profiled(device) as profiler:
        for step in steps[1:]:
            with record_function(STEP):
                step()
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
    begin, end = window_of(events)
    kernels, ranges = kernels_of(events), [event for event in events if is_range(event)]
    on_cpu = bool(kernels) and kernels[0].category == "cpu_op"
    step_us = (end - begin) / num_steps
    busy_us, found = _busy_and_gaps(kernels, ranges, begin, end)
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
        busy_ms=busy_us / num_steps / 1e3,
        num_kernels=len(outermost(kernels) if on_cpu else kernels) / num_steps,
        largest=_totals(_own_us(kernels), num_steps, step_us)[:NUM_LARGEST],
        num_gaps=len(found) / num_steps,
        gaps=tuple(found[:NUM_LARGEST]),
        ranges=_totals([(range_name(each), each.us) for each in ranges], num_steps, step_us),
        trace=trace_name,
        num_named=num_named,
        notes=tuple(notes),
    )


def _own_us(kernels: Sequence[Event]) -> list[tuple[str, float]]:
    """Return the name of each, and its time without what it calls in turn."""
    own = [event.us for event in kernels]
    open_events: dict[object, list[int]] = defaultdict(list)
    for index, event in enumerate(kernels):
        callers = open_events[event.thread]
        while callers and kernels[callers[-1]].end <= event.start:
            callers.pop()
        # Kernels of two streams lie beside each other, not in each other.
        if callers and event.category == "cpu_op":
            own[callers[-1]] -= event.us
        callers.append(index)
    return [(event.name, us) for event, us in zip(kernels, own, strict=True)]


def _totals(
    times: Sequence[tuple[str, float]], num_steps: int, step_us: float
) -> tuple[Total, ...]:
    """Add up microseconds by name; what takes most time comes first."""
    by_name = defaultdict[str, list[float]](list)
    for name, us in times:
        by_name[name].append(us)
    found = []
    for name, own in by_name.items():
        us = sum(own) / num_steps
        found.append(Total(name, us / 1e3, len(own) / num_steps, us / step_us if step_us else 0.0))
    return tuple(sorted(found, key=lambda total: -total.ms))


def _busy_and_gaps(
    kernels: Sequence[Event], ranges: Sequence[Event], begin: float, end: float
) -> tuple[float, list[Gap]]:
    """Return the microseconds in which something ran, and the other stretches, longest first."""
    found = []
    busy_us, reached, last = 0.0, begin, ""
    for event in [*kernels, Event("", "", end, end, ("", ""))]:
        start, stop = max(event.start, begin), min(event.end, end)
        if stop < start:
            continue
        if start - reached > _SHORTEST_GAP_US:
            middle = (reached + start) / 2
            around = [each for each in ranges if each.start <= middle < each.end]
            innermost = min(around, key=lambda each: each.us, default=None)
            within = "" if innermost is None else range_name(innermost)
            found.append(Gap((start - reached) / 1e3, last, event.name, within))
        if stop > reached:
            busy_us += stop - max(start, reached)
            reached, last = stop, event.name
    return busy_us, sorted(found, key=lambda gap: -gap.ms)


def range_name(event: Event) -> str:
    """Return the name without what marks it as ours."""
    name = event.name.removeprefix(RANGE_PREFIX)
    return f"{name}(root)" if name.endswith(" ") else name  # the outermost unit has no name
