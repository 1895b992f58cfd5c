"""Paired speed of ZeRO-3 on two gloo ranks: with overlap and pool, and without.

The same GPT on the same batches, captured and not; all contenders live in the same processes and
take turns, and all losses must be equal bit for bit. Writes ``overlap_cpu.json`` into the
directory that OUT names (default benchmarks/results); ``python -m benchmarks.readme_table`` puts
it into the README.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console

from benchmarks import environment, workloads
from benchmarks.readme_table import overlap_cpu
from benchmarks.sharding import graphfsdp_contender
from benchmarks.timing import interleave, speedups
from benchmarks.workloads import WARMUP_STEPS, Workload

RESULT_NAME = "overlap_cpu.json"
WORKLOADS = (workloads.TINY, workloads.GPT_3M)
# Name: scope, options of fully_shard, and the contender that it is compared with.
CONTENDERS: Mapping[str, tuple[str, Mapping[str, bool], str | None]] = {
    "not captured, one after the other": ("none", {"overlap": False}, None),
    "not captured, overlap": ("none", {}, "not captured, one after the other"),
    "not captured, overlap and pool": (
        "none",
        {"buffer_pool": True},
        "not captured, one after the other",
    ),
    "captured, one after the other": ("full_iteration", {"overlap": False}, None),
    "captured, overlap": ("full_iteration", {}, "captured, one after the other"),
}


def measure_on_rank(
    rank: int, num_ranks: int, folder: str, workload: Workload, num_rounds: int, num_steps: int
) -> None:
    """Measure one workload as one of the ranks; rank 0 writes the record into the folder."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    steps = {
        name: graphfsdp_contender(workload, scope, **options)
        for name, (scope, options, _) in CONTENDERS.items()
    }
    losses = {name: [step() for _ in range(WARMUP_STEPS + 3)] for name, step in steps.items()}
    base = next(iter(losses.values()))
    for name, own in losses.items():
        if not all(torch.equal(left, right) for left, right in zip(base, own, strict=True)):
            raise SystemExit(f"{name} computes something else than the first contender")
    seconds = interleave(steps, num_rounds, num_steps, torch.device("cpu"))
    if rank == 0:
        record = {
            name: {
                "step_ms_by_round": [value * 1e3 for value in seconds[name]],
                "reference": reference,
                "speedup": None
                if reference is None
                else asdict(
                    speedups({key: seconds[key] for key in (name, reference)}, reference)[name]
                ),
            }
            for name, (_, _, reference) in CONTENDERS.items()
        }
        (pathlib.Path(folder) / "record").write_text(json.dumps(record))
    dist.barrier()
    os._exit(0)  # graphs and groups are still alive; nothing of theirs is worth an orderly end


def measure(workload: Workload, num_ranks: int, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Measure one workload on fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, folder, workload, num_rounds, num_steps)
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            measure_on_rank, arguments, num_ranks
        )
        record = json.loads((pathlib.Path(folder) / "record").read_text())
    return {
        "name": workload.name,
        "batch_per_rank": workload.shape,
        "num_ranks": num_ranks,
        "num_rounds": num_rounds,
        "steps_per_window": num_steps,
        "contenders": record,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps of a window")
    parser.add_argument("--ranks", type=int, default=2)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--only", choices=names, action="append", help="a model; repeatable")
    options = parser.parse_args(arguments)
    document = {
        "kind": "overlap_cpu",
        "environment": environment.describe(torch.device("cpu")),
        "load_average_before": os.getloadavg()[0],
        "workloads": [
            measure(workload, options.ranks, options.rounds, options.steps)
            for workload in WORKLOADS
            if workload.name in (options.only or names)
        ],
    }
    console = Console(width=None if sys.stdout.isatty() else 160)
    path = environment.output_directory() / RESULT_NAME
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(overlap_cpu(path.parent), markup=False)
    console.print(f"wrote {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
