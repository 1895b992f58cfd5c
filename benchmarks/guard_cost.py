"""What asking the guards costs before a replay, as a share of it, for twelve small architectures.

``python -m benchmarks.guard_cost`` prints a table and writes guard_cost_cpu.json.
"""

import dataclasses
import json
import pathlib
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from graphfsdp.bench.batches import batch_source
from graphfsdp.bench.contenders import OwnContender, Setting
from graphfsdp.bench.machine import find_environment
from graphfsdp.bench.measure import NUM_WARMUP_STEPS
from graphfsdp.bench.workloads import Case, suite
from graphfsdp.config import Scope

RESULT = pathlib.Path(__file__).resolve().parent / "results" / "guard_cost_cpu.json"
CPU = torch.device("cpu")
NUM_PAIRS = 400


def measure(case: Case) -> dict[str, Any]:
    """Time replays, and right after each, with caches as a replay leaves them, its guards."""
    contender = OwnContender(Setting(case, CPU), Scope.FULL_ITERATION)
    _, source = batch_source(case, data=None, random_tokens=False, seed=0, device=CPU)
    batches = source.take(0, NUM_WARMUP_STEPS + NUM_PAIRS)
    for step, batch in enumerate(batches[:NUM_WARMUP_STEPS]):
        contender(batch, step)
    recording = contender.step._runner._recordings.latest
    assert recording is not None
    assert recording.guards is not None
    changes = recording.guards.changes
    replays, guards = [], []
    for step, batch in enumerate(batches[NUM_WARMUP_STEPS:], NUM_WARMUP_STEPS):
        start = time.perf_counter()
        contender(batch, step)
        between = time.perf_counter()
        assert changes() == []
        guards.append(time.perf_counter() - between)
        replays.append(between - start)
    contender.close()
    shares = [guard / replay for guard, replay in zip(guards, replays, strict=True)]
    return {
        "name": case.workload.name,
        "num_tensors": len(contender.optimizer.param_groups[0]["params"]),
        "guards_us": statistics.median(guards) * 1e6,
        "replay_us": statistics.median(replays) * 1e6,
        "share": statistics.median(shares),
    }


def main() -> None:
    torch.set_num_threads(1)
    results = [measure(planned.case) for planned in suite("zoo")]
    worst = max(results, key=lambda result: result["share"])
    table = Table(title="Guards before a replay")
    table.add_column("architecture")
    for heading in ("parameters", "guards us", "replay us", "share"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result["name"],
            str(result["num_tensors"]),
            f"{result['guards_us']:.1f}",
            f"{result['replay_us']:.1f}",
            f"{result['share']:.2%}",
        )
    Console(width=100).print(table, f"worst: {worst['share']:.2%}, {worst['name']}")
    record = {
        "kind": "guard_cost",
        "environment": dataclasses.asdict(find_environment(CPU, num_threads=1)),
        "worst_share": worst["share"],
        "architectures": results,
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
