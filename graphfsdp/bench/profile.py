"""Profiles of contenders: a Chrome trace for each, its largest kernels, gaps and phases.

On a GPU kernels, copies and fills count; on a CPU operators, those that other operators call
being part of them. What Python, autograd or compiled code does around them is a gap.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import graphfsdp
from graphfsdp.base.nvtx import RANGE_PREFIX
from graphfsdp.bench.records import to_json

STEP = "graphfsdp bench: step"
NUM_LARGEST = 10
_MAX_NAME = 100  # in text: templates of C++ have names of thousands of characters
# Shorter ones are the clock's resolution, and the driver's between two kernels of a graph.
_SHORTEST_GAP_US = 0.01
_CALLERS = (RANGE_PREFIX, "autograd::", "torch::autograd::")
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
    ``graph`` is the trace of a contender's graph, None where there is none.
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
    graph: str | None = None
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
    if record.graph is not None:
        lines.append(f"  phases, modules and nodes of the graph that a replay runs: {record.graph}")
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 3] + "..."


@contextlib.contextmanager
def profiled(device: torch.device) -> Iterator[profile]:
    """Listen to the host, and to a GPU until it has done what the body asked of it."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # acc_events: torch 2.11 warns of a second profile in a process otherwise.
    with profile(activities=activities, acc_events=True) as profiler:
        yield profiler
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def profile_contender(
    steps: Sequence[Callable[[], object]],
    *,
    case: str,
    contender: str,
    device: torch.device,
    folder: Path,
    report: graphfsdp.CaptureReport | None = None,
) -> ProfileRecord:
    """Run some steps under torch's profiler; the first one only gets the profiler itself started.

    The folder exists, and gets CONTENDER.trace.json, .txt, .json, and with a report .graph.json: a
    replay runs no Python that could name phases and modules, the graph's report knows them.
    """
    with profiled(device):
        steps[0]()
    with profiled(device) as profiler:
        for step in steps[1:]:
            with record_function(STEP):
                step()
    trace, graph = f"{contender}.trace.json", None
    profiler.export_chrome_trace(str(folder / trace))
    if report is not None:
        graph = f"{contender}.graph.json"
        report.chrome_trace(folder / graph)
    events = profiler.events()
    assert events is not None
    record = summarise(events, case=case, contender=contender, trace=trace, graph=graph)
    (folder / f"{contender}.json").write_text(to_json(record), encoding="utf-8")
    (folder / f"{contender}.txt").write_text(describe_profile(record), encoding="utf-8")
    return record


def summarise(
    events: EventList, *, case: str, contender: str, trace: str, graph: str | None = None
) -> ProfileRecord:
    kernels = [event for event in events if _is_on_gpu(event)]
    on_cpu = not kernels
    if on_cpu:
        kernels = [event for event in events if _is_operator(event.name)]
    kernels.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    ranges = [event for event in events if _is_range(event)]
    steps = [e.time_range for e in events if e.name == STEP and e.device_type == DeviceType.CPU]
    begin = steps[0].start
    end = max([steps[-1].end, *([] if on_cpu else [each.time_range.end for each in kernels])])
    step_us = (end - begin) / len(steps)
    busy_us, gaps = _busy_and_gaps(kernels, ranges, begin, end)

    def totals(found: Iterator[tuple[str, float, int]]) -> tuple[Total, ...]:
        made = (
            Total(name, us / len(steps) / 1e3, calls / len(steps), us / (end - begin))
            for name, us, calls in found
        )
        return tuple(sorted(made, key=lambda total: -total.ms))

    averages = events.key_averages()
    if on_cpu:
        num_kernels = sum(not _lies_in_an_operator(event) for event in kernels)
        times = ((e.key, e.self_cpu_time_total, e.count) for e in averages if _is_operator(e.key))
    else:
        num_kernels = len(kernels)
        times = ((e.key, e.self_device_time_total, e.count) for e in averages if _is_on_gpu(e))
    named = ((range_name(e), e.cpu_time_total, e.count) for e in averages if _is_range(e))
    is_compiled = any("Torch-Compiled Region" in event.name for event in events)
    return ProfileRecord(
        case=case,
        contender=contender,
        what="operators" if on_cpu else "kernels",
        num_steps=len(steps),
        step_ms=step_us / 1e3,
        busy_ms=busy_us / len(steps) / 1e3,
        num_kernels=num_kernels / len(steps),
        largest=totals(times)[:NUM_LARGEST],
        num_gaps=len(gaps) / len(steps),
        gaps=tuple(gaps[:NUM_LARGEST]),
        ranges=totals(named),
        trace=trace,
        graph=graph,
        notes=(_COMPILED,) if on_cpu and is_compiled else (),
    )


def _is_on_gpu(event: FunctionEvent) -> bool:
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def _is_operator(name: str) -> bool:
    """Return whether it is an operator, not what calls operators: autograd, a module, a range."""
    return not name.startswith(_CALLERS) and ("::" in name or "cpp_fused" in name)


def _is_range(event: FunctionEvent) -> bool:
    """Return whether somebody named this stretch of the host's time."""
    if event.device_type != DeviceType.CPU or event.key == STEP:
        return False
    return event.key.startswith(RANGE_PREFIX) or bool(event.is_user_annotation)


def _lies_in_an_operator(event: FunctionEvent) -> bool:
    caller = event.cpu_parent
    return caller is not None and (_is_operator(caller.name) or _lies_in_an_operator(caller))


def _busy_and_gaps(
    kernels: Sequence[FunctionEvent], ranges: Sequence[FunctionEvent], begin: float, end: float
) -> tuple[float, list[Gap]]:
    """Return the microseconds in which something ran, and the other stretches, longest first."""
    found = []
    busy_us, reached, last = 0.0, begin, ""
    times = [(event.time_range.start, event.time_range.end, event.name) for event in kernels]
    for starts, stops, name in [*times, (end, end, "")]:
        start, stop = max(starts, begin), min(stops, end)
        if stop < start:
            continue
        if start - reached > _SHORTEST_GAP_US:
            middle = (reached + start) / 2
            around = [e for e in ranges if e.time_range.start <= middle < e.time_range.end]
            innermost = min(around, key=lambda e: e.time_range.elapsed_us(), default=None)
            within = "" if innermost is None else range_name(innermost)
            found.append(Gap((start - reached) / 1e3, last, name, within))
        if stop > reached:
            busy_us += stop - max(start, reached)
            reached, last = stop, name
    return busy_us, sorted(found, key=lambda gap: -gap.ms)


def range_name(event: FunctionEvent) -> str:
    """Return the name without what marks it as ours."""
    name = str(event.key).removeprefix(RANGE_PREFIX)
    return f"{name}(root)" if name.endswith(" ") else name  # the outermost unit has no name
