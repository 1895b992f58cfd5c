"""Phases and modules of graph replays in a Chrome trace.

A replay runs no Python that could name them, but the graph's report knows them for each node, and
a replay runs its nodes in order. So the events of each replay are counted off against the nodes.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphfsdp.base.nvtx import RANGE_PREFIX
from graphfsdp.bench.profile_events import DEVICE_CATEGORIES, Event, is_operator, outermost

_REPLAY = RANGE_PREFIX + "replay"
_LAUNCH = "cudaGraphLaunch"
_TRACKS = ("phases", "modules")
_SEEN_NODES = ("kernel", "memcpy", "memset")  # of a CUDA graph, by a profiler; others order these
_ROOT = "(root module)"
_PROCESS = "graphfsdp"


@dataclass(frozen=True)
class GraphNode:
    """A node of the graph that a replay runs.

    Attributes:
        phase: "forward", "backward" or "optimizer".
        module: Full name of the module, empty for the outermost; None outside of all.
    """

    phase: str
    module: str | None


def replay_nodes(report: Any) -> tuple[GraphNode, ...]:
    """Return what a replay runs, in order: called operators on a CPU, kernels on CUDA.

    Args:
        report: The ``CaptureReport`` of a step.
    """
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
    """Add a track of phases and one of modules to a trace.

    Args:
        trace: The trace, which is changed.
        events: Its events.
        nodes: What a replay runs, from ``replay_nodes``.

    Returns:
        How many events were named; 0 where they cannot be told apart.
    """
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
    """Return a slice for each run of events with the same name."""
    found = []
    labelled = zip(names, (event for event, _ in pairs), strict=True)
    for name, group in itertools.groupby(labelled, key=lambda pair: pair[0]):
        if name is None:
            continue
        run = [event for _, event in group]
        start, end = run[0].start, max(event.end for event in run)
        found.append(
            {
                **{
                    "ph": "X",
                    "cat": _TRACKS[track],
                    "name": name or _ROOT,
                    "pid": _PROCESS,
                    "tid": track,
                },
                **{"ts": start, "dur": end - start, "args": {"num_events": len(run)}},
            }
        )
    return found


def _meta(kind: str, track: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if kind.endswith("sort_index") else "name"
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "ts": 0, "args": {key: value}}
