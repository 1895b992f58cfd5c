"""Paired speed and memory of the scopes on this CPU; `make bench`.

Prints a table and writes ``paired_cpu.json`` into the directory that OUT names (default
benchmarks/results). ``python -m benchmarks.readme_table`` puts the numbers into the README.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import environment, memory, workloads
from benchmarks.timing import Spread, as_record, interleave
from benchmarks.workloads import SCOPES, Run, Workload

RESULT_NAME = "paired_cpu.json"
REFERENCE = "none"


@dataclass(frozen=True)
class Plan:
    """How long a workload is measured: about a minute each."""

    workload: Workload
    num_rounds: int
    num_steps: int


PLANS = (
    Plan(workloads.TINY, num_rounds=40, num_steps=30),
    Plan(workloads.GPT_3M, num_rounds=30, num_steps=3),
    Plan(workloads.GPT_11M, num_rounds=25, num_steps=2),
)


def measure_speed(plan: Plan) -> dict[str, object]:
    """Time all scopes of one workload in this process, in turns."""
    device = torch.device("cpu")
    torch.set_num_threads(plan.workload.num_threads)
    runs = {scope: Run(plan.workload, scope, device) for scope in SCOPES}
    for run in runs.values():
        run.warm_up()
    seconds = interleave(runs, plan.num_rounds, plan.num_steps, device)
    for run in runs.values():
        run.close()
    return as_record(seconds, REFERENCE)


def measure_memory(workload: Workload, num_repeats: int) -> dict[str, dict[str, float]]:
    """Return the median peaks of each scope and their ratios to eager's; a process each time.

    Empty where the system does not let a process measure its peak.
    """
    if not memory.is_available():
        return {}
    repeats: dict[str, list[dict[str, int]]] = {scope: [] for scope in SCOPES}
    for _ in range(num_repeats):
        for scope in SCOPES:
            repeats[scope].append(memory.measure(workload, scope))
    peaks = {
        scope: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for scope, runs in repeats.items()
    }
    eager = peaks[REFERENCE]
    return {
        scope: {**peak, **{f"{key}_ratio": value / eager[key] for key, value in peak.items()}}
        for scope, peak in peaks.items()
    }


def measure(plan: Plan, num_repeats: int) -> dict[str, object]:
    """Measure one workload."""
    workload = plan.workload
    with Run(workload, REFERENCE, torch.device("cpu")) as run:
        num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    return {
        "name": workload.name,
        "num_parameters": num_parameters,
        "batch": workload.shape,
        "num_threads": workload.num_threads,
        "num_rounds": plan.num_rounds,
        "steps_per_window": plan.num_steps,
        "tokens_per_step": workload.tokens_per_step,
        "speed": measure_speed(plan),
        "memory": measure_memory(workload, num_repeats),
    }


def table_of(results: Sequence[dict[str, object]]) -> Table:
    """Return the results for a terminal."""
    table = Table(title="graphfsdp scopes on this CPU, paired with eager (scope none)")
    table.add_column("workload")
    table.add_column("scope")
    for heading in ("ms/step", "times as fast: median (min to max)", "peak MiB", "with recording"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        speed, peaks = result["speed"], result["memory"]
        assert isinstance(speed, dict)
        assert isinstance(peaks, dict)
        for scope in SCOPES:
            ratio = speed[scope]["speedup"]
            peak = peaks.get(scope)
            table.add_row(
                f"{result['name']}, {result['num_threads']} thread(s)" if scope == "none" else "",
                scope,
                f"{speed[scope]['step_ms']:.2f}",
                str(Spread(**ratio)) if ratio else "1",
                *(
                    f"{peak[key] / 2**20:.1f} ({peak[f'{key}_ratio']:.2f} of eager's)"
                    if peak
                    else "not measured"
                    for key in ("replay_peak_bytes", "peak_bytes")
                ),
                end_section=scope == SCOPES[-1],
            )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paired", description=__doc__)
    names = [plan.workload.name for plan in PLANS]
    parser.add_argument("--only", choices=names, action="append", help="a workload; repeatable")
    parser.add_argument("--rounds", type=int, help="rounds instead of each workload's own number")
    parser.add_argument("--memory-repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    load_average = os.getloadavg()[0]
    if load_average > 0.5:
        console.print(
            f"something else runs on this machine (load average {load_average:.1f}); "
            "the pairs will scatter",
            style="yellow",
        )
    results: list[dict[str, object]] = []
    for plan in PLANS:
        if plan.workload.name in (options.only or names):
            console.print(f"measuring {plan.workload.name} ...", style="dim")
            chosen = Plan(plan.workload, options.rounds or plan.num_rounds, plan.num_steps)
            results.append(measure(chosen, options.memory_repeats))
    console.print(table_of(results))
    document = {
        "kind": "paired_cpu",
        "environment": environment.describe(torch.device("cpu")),
        "load_average_before": load_average,
        "workloads": results,
    }
    path = environment.output_directory() / RESULT_NAME
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"wrote {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
