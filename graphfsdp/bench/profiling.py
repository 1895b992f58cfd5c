"""Profiles of contenders: a Chrome trace and a summary for each, or marks for Nsight Systems."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from graphfsdp.bench.profile_events import (
    STEP,
    busy_us,
    events_of,
    gaps,
    is_range,
    kernels_of,
    largest,
    outermost,
    range_totals,
    steps_of,
    window_of,
)
from graphfsdp.bench.profile_names import GraphNode, name_replays
from graphfsdp.bench.profile_records import NUM_LARGEST, ProfileRecord, describe_profile
from graphfsdp.bench.record_files import to_json

Step = Callable[[], object]

NSYS_NOTE = (
    "--nsys marks steps for Nsight Systems, which sees GPUs; on a CPU there is nothing to mark, "
    "--profile shows the operators"
)
_NOT_NAMED = (
    "the events of a replay cannot be told apart, so the timeline has no phases and modules of "
    "graph replays"
)
_COMPILED = (
    "code that torch.compile made for a CPU is no operator, so the time that it runs is in the gaps"
)


def profile_contender(
    steps: Sequence[Step],
    *,
    case: str,
    contender: str,
    device: torch.device,
    folder: Path,
    nodes: Sequence[GraphNode] = (),
) -> ProfileRecord:
    """Run some steps under torch's profiler, and keep what was seen.

    Args:
        steps: At least two; the first one only gets the profiler itself started.
        case: Key of the workload.
        contender: Name, also of the files.
        device: Where it trains.
        folder: Exists; gets NAME.trace.json, NAME.txt and NAME.json.
        nodes: What a replay of its graph runs; empty without a graph.
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


@contextmanager
def nsys_range(device: torch.device) -> Iterator[bool]:
    """Let Nsight Systems record while the body runs; yields whether there is anything to record.

    For ``nsys profile --capture-range=cudaProfilerApi``.
    """
    if device.type != "cuda":
        yield False
        return
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    try:
        yield True
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()
