"""Profiles of contenders: a Chrome trace for each, and torch's table of what ran how long."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import graphfsdp

STEP = "graphfsdp bench: step"
_NAME_WIDTH = 80  # templates of C++ have names of thousands of characters


def _profiler(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # acc_events: torch 2.11 warns of a second profile in a process otherwise.
    return profile(activities=activities, acc_events=True)


def _run(steps: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return milliseconds per step, until a GPU has done what was asked of it."""
    start = time.perf_counter()
    for step in steps:
        with record_function(STEP):
            step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3 / len(steps)


def profile_contender(
    steps: Sequence[Callable[[], object]],
    *,
    contender: str,
    device: torch.device,
    folder: Path,
    report: graphfsdp.CaptureReport | None = None,
) -> None:
    """Run some steps under torch's profiler; the first one only gets the profiler itself started.

    The folder exists, and gets CONTENDER.trace.json, .txt, and with a report .graph.json: a replay
    runs no Python that could name phases and modules, the graph's report knows them.
    """
    with _profiler(device):
        _run(steps[:1], device)
    with _profiler(device) as profiler:
        step_ms = _run(steps[1:], device)
    profiler.export_chrome_trace(str(folder / f"{contender}.trace.json"))
    if report is not None:
        report.chrome_trace(folder / f"{contender}.graph.json")
    ran_on = "cuda" if device.type == "cuda" else "cpu"
    table = profiler.key_averages().table(
        sort_by=f"self_{ran_on}_time_total", max_name_column_width=_NAME_WIDTH
    )
    about = f"{contender}: {len(steps[1:])} steps of {step_ms:.3f} ms under torch's profiler\n\n"
    (folder / f"{contender}.txt").write_text(about + table, encoding="utf-8")
