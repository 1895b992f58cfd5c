"""What asking the guards costs before a replay, as a share of it, for twelve small architectures.

``python -m benchmarks.guard_cost`` prints a table and writes guard_cost_cpu.json; see zoo_speed.
"""

import json
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.zoo_models import Architecture, architectures
from benchmarks.zoo_speed import WARM_UP, Contender

RESULT_NAME = "guard_cost_cpu.json"
NUM_PAIRS = 400


def measure(name: str, architecture: Architecture) -> dict[str, Any]:
    """Time replays, and right after each, with caches as a replay leaves them, its guards."""
    contender = Contender(architecture, "full_iteration")
    for _ in range(WARM_UP):
        contender()
    recording = contender.step._runner._recordings.latest
    assert recording is not None
    assert recording.guards is not None
    changes = recording.guards.changes
    replays, guards = [], []
    for _ in range(NUM_PAIRS):
        start = time.perf_counter()
        contender()
        between = time.perf_counter()
        assert changes() == []
        guards.append(time.perf_counter() - between)
        replays.append(between - start)
    contender.step.close()
    shares = [guard / replay for guard, replay in zip(guards, replays, strict=True)]
    return {
        "name": name,
        "num_tensors": len(list(contender.model.parameters())),
        "num_modules": len(list(contender.model.modules())),
        "guards_us": statistics.median(guards) * 1e6,
        "replay_us": statistics.median(replays) * 1e6,
        "share": statistics.median(shares),
    }


def main() -> None:
    """Measure, print, and write the result file."""
    torch.set_num_threads(1)
    results = [measure(name, each) for name, each in architectures().items()]
    worst = max(results, key=lambda result: result["share"])
    table = Table(title="Guards before a replay")
    table.add_column("architecture")
    for heading in ("parameters", "modules", "guards us", "replay us", "share"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result["name"],
            str(result["num_tensors"]),
            str(result["num_modules"]),
            f"{result['guards_us']:.1f}",
            f"{result['replay_us']:.1f}",
            f"{result['share']:.2%}",
        )
    Console(width=100).print(table, f"worst: {worst['share']:.2%}, {worst['name']}")
    record = {
        "kind": "guard_cost",
        "environment": environment.describe(torch.device("cpu")),
        "worst_share": worst["share"],
        "architectures": results,
    }
    path = environment.output_directory() / RESULT_NAME
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
