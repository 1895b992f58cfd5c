"""The events of a Chrome trace: kernels, steps, named stretches, and what graph replays ran.

On a GPU kernels, copies and fills count; on a CPU operators, those that other operators call
being part of them. What Python, autograd or compiled code does around them is a gap.

A replay runs no Python that could name phases and modules, but the graph's report knows them for
each node, and a replay runs its nodes in order. So the events of each replay are counted off
against the nodes.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphfsdp.base.nvtx import RANGE_PREFIX

STEP = "graphfsdp bench: step"
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLERS = (RANGE_PREFIX, "autograd::", "torch::autograd::")
_REPLAY = RANGE_PREFIX + "replay"
_LAUNCH = "cudaGraphLaunch"
_TRACKS = ("phases", "modules")
_SEEN_NODES = ("kernel", "memcpy", "memset")  # of a CUDA graph, by a profiler; others order these
_ROOT = "(root module)"
_PROCESS = "graphfsdp"


@dataclass(frozen=True)
class Event:
    """A complete event of a Chrome trace, times in microseconds.

    ``correlation`` is the number of the launch that a GPU's event belongs to.
    """

    name: str
    category: str
    start: float
    end: float
    thread: tuple[object, object]
    correlation: int | None = None

    @property
    def us(self) -> float:
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
    return [e for e in events if e.name == STEP and e.category == "user_annotation"]


def window_of(events: Sequence[Event]) -> tuple[float, float]:
    """Return when the first step began and the last one was over, on the GPU too."""
    steps = steps_of(events)
    ends = [event.end for event in events if event.category in DEVICE_CATEGORIES]
    return steps[0].start, max([steps[-1].end, *ends])


@dataclass(frozen=True)
class GraphNode:
    """``module`` is its full name, empty for the outermost; None outside of all."""

    phase: str
    module: str | None


def replay_nodes(report: Any) -> tuple[GraphNode, ...]:
    """In order: called operators on a CPU, kernels on CUDA; ``report`` is a ``CaptureReport``."""
    found = []
    for node in report.nodes():
        on_device = sum(name.startswith(_SEEN_NODES) for name in node.kernels)
        number = on_device if report.backend == "cuda" else int(node.called)
        found += [GraphNode(node.site.phase.value, node.site.module)] * number
    return tuple(found)


def replays_of(events: Sequence[Event]) -> list[list[Event]]:
    """Return what each replay has run, in order: kernels by launch, or operators by range."""
    launches = [event for event in events if event.name.startswith(_LAUNCH)]
    if launches:
        by_launch = defaultdict[int, list[Event]](list)
        for event in events:
            if event.category in DEVICE_CATEGORIES and event.correlation is not None:
                by_launch[event.correlation].append(event)
        numbers = (event.correlation for event in launches)
        return [by_launch[number] for number in numbers if number is not None]
    operators = outermost(event for event in events if is_operator(event))
    return [
        [
            event
            for event in operators
            if event.thread == replay.thread and replay.start <= event.start < replay.end
        ]
        for replay in events
        if replay.name == _REPLAY
    ]


def name_replays(trace: dict[str, Any], events: Sequence[Event], nodes: Sequence[GraphNode]) -> int:
    """Changes the trace; returns how many events were named, 0 where they cannot be told apart."""
    replays = replays_of(events)
    if not replays or not nodes or any(len(replay) < len(nodes) for replay in replays):
        return 0
    added: list[dict[str, Any]] = []
    for number, track in enumerate(_TRACKS):
        added.append(_meta("thread_name", number, track))
        added.append(_meta("thread_sort_index", number, number))
    added.append(_meta("process_name", 0, "graphfsdp: graph replays"))
    for replay in replays:
        # What a replay runs beyond its nodes copies what the model keeps.
        pairs = list(zip(replay, nodes, strict=False))
        added += _slices(pairs, [node.phase for node in nodes], 0)
        added += _slices(pairs, [node.module for node in nodes], 1)
    trace["traceEvents"].extend(added)
    return len(replays) * len(nodes)


def _slices(
    pairs: Sequence[tuple[Event, GraphNode]], names: Sequence[str | None], track: int
) -> list[dict[str, Any]]:
    found = []
    labelled = zip(names, (event for event, _ in pairs), strict=True)
    for name, group in itertools.groupby(labelled, key=lambda pair: pair[0]):
        if name is None:
            continue
        run = [event for _, event in group]
        start, end = run[0].start, max(event.end for event in run)
        where = {"cat": _TRACKS[track], "pid": _PROCESS, "tid": track}
        times = {"ts": start, "dur": end - start, "args": {"num_events": len(run)}}
        found.append({"ph": "X", "name": name or _ROOT, **where, **times})
    return found


def _meta(kind: str, track: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if kind.endswith("sort_index") else "name"
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "ts": 0, "args": {key: value}}
