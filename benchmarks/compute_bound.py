"""What is left to gain where arithmetic is the limit: paired processor time on one thread.

Models of 3 and 11 million parameters, 8 sequences of 128 tokens: captured, our iteration run
eagerly (``scope="none"``), and a plain PyTorch loop (AdamW(fused=True), clip_grad_norm_). Processor
time of the process, since a wait for a busy core would say nothing of the program.

``python -m benchmarks.compute_bound`` prints a table and writes results/compute_bound_cpu.json.
"""

import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks import environment, workloads
from graphfsdp.bench.spread import Spread
from graphfsdp.training.gpt import GPT

RESULTS = pathlib.Path(__file__).parent / "results" / "compute_bound_cpu.json"
NUM_ROUNDS = {"gpt-3.3m": 40, "gpt-10.9m": 16}
CPU = torch.device("cpu")

Step = Callable[[], object]


def captured(workload: workloads.Workload, scope: str) -> Step:
    """Return a step of ours, past its capture."""
    run = workloads.Run(workload, scope, CPU)
    run.warm_up()
    return run


def plain(workload: workloads.Workload) -> Step:
    """Return a step of a PyTorch loop."""
    torch.manual_seed(0)
    model = GPT(workload.model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batches = workloads.batches(workload, CPU)

    def step() -> Tensor:
        loss: Tensor = model(*next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step()
    return step


def measure(workload: workloads.Workload) -> dict[str, Any]:
    """Return processor milliseconds by contender, and ratios within rounds."""
    steps = {
        "pytorch": plain(workload),
        "eager": captured(workload, "none"),
        "full_iteration": captured(workload, "full_iteration"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in track(range(NUM_ROUNDS[workload.name]), f"{workload.name}, {workload.shape} tokens"):
        for name in order:
            start = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - start)
        order.reverse()

    def over(name: str) -> dict[str, float]:
        pairs = zip(seconds[name], seconds["full_iteration"], strict=True)
        return dataclasses.asdict(Spread.of([base / own for base, own in pairs]))

    return {
        "workload": workload.name,
        "shape": workload.shape,
        "processor_ms": {name: statistics.median(each) * 1e3 for name, each in seconds.items()},
        "over_pytorch": over("pytorch"),
        "over_eager": over("eager"),
    }


def main() -> None:
    """Measure, print, and write the result file."""
    torch.set_num_threads(1)
    found = [measure(workload) for workload in (workloads.GPT_3M, workloads.GPT_11M)]
    table = Table(title="Processor time of a step where arithmetic is the limit")
    for heading in ("model", "PyTorch ms", "eager ms", "replay ms", "over PyTorch", "over eager"):
        table.add_column(heading, justify="right")
    for result in found:
        times = [f"{ms:.0f}" for ms in result["processor_ms"].values()]
        ratios = [
            f"{result[key]['median']:.2f}x ({result[key]['minimum']:.2f} to "
            f"{result[key]['maximum']:.2f})"
            for key in ("over_pytorch", "over_eager")
        ]
        table.add_row(result["workload"], *times, *ratios)
    Console().print(table)
    record = {"kind": "compute_bound", "environment": environment.describe(CPU), "models": found}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
