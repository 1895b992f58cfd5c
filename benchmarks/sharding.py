"""Paired speed of ZeRO-3 on two gloo ranks: graphfsdp against PyTorch's own fully_shard.

Both shard the same GPT in the same units and train on the same batches; PyTorch's steps with
AdamW(fused=True), graphfsdp's with FusedAdam, captured and not. All contenders live in the same
processes and take turns, so that a slow minute hits them all. Writes ``sharding_cpu.json`` into
the directory that OUT names (default benchmarks/results).
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import graphfsdp
from benchmarks import environment, workloads
from benchmarks.timing import as_record, interleave
from benchmarks.workloads import WARMUP_STEPS, Workload
from graphfsdp.bench.spread import Spread
from graphfsdp.optim import FusedAdam
from graphfsdp.training.gpt import GPT

RESULT_NAME = "sharding_cpu.json"
REFERENCE = "torch fully_shard"
CAPTURED = "graphfsdp, captured"
EAGER = "graphfsdp, not captured"
CONTENDERS = (REFERENCE, EAGER, CAPTURED)
LR = 1e-3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
# Two runs of float32 on two ranks: sums in another order. A wrong factor shows by far more.
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Plan:
    """How long a workload is measured, and the goal for the captured contender."""

    workload: Workload
    kind: str
    goal: float
    num_rounds: int
    num_steps: int


PLANS = (
    Plan(workloads.TINY, "launch-bound", 1.5, num_rounds=30, num_steps=10),
    Plan(workloads.GPT_3M, "compute-bound", 1.0, num_rounds=20, num_steps=2),
)

Contender = Callable[[], Tensor]


def rank_batches(workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's tokens and targets for ever; other ranks get other ones."""
    source = workloads.batches(workload, torch.device("cpu"))
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    while True:
        group = [next(source) for _ in range(num_ranks)]
        yield group[rank]


def make_gpt(workload: Workload) -> GPT:
    """Return the model, the same on every rank and for every contender."""
    torch.manual_seed(0)
    return GPT(workload.model)


def blocks_of(model: GPT) -> list[nn.Module]:
    """Return the modules that become units below the root."""
    return list(model.blocks)


def torch_contender(workload: Workload) -> Contender:
    """Return a step with PyTorch's own sharding."""
    model = make_gpt(workload)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks_of(model):
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    source = rank_batches(workload)

    def step() -> Tensor:
        loss: Tensor = model(*next(source))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def graphfsdp_contender(workload: Workload, scope: str, **options: bool) -> Contender:
    """Return a step with graphfsdp's sharding, with the given options of it."""
    model = make_gpt(workload)
    further: dict[str, Any] = dict(options)
    for block in blocks_of(model):
        graphfsdp.fully_shard(block, **further)
    graphfsdp.fully_shard(model, **further)
    optimizer = FusedAdam(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    step = graphfsdp.capture(model, optimizer, scope=scope, warmup_steps=WARMUP_STEPS)
    source = rank_batches(workload)

    def call() -> Tensor:
        loss: Tensor = step(*next(source))
        return loss

    return call


def measure_on_rank(rank: int, num_ranks: int, folder: str, plan: Plan) -> None:
    """Measure one workload as one of the ranks; rank 0 writes the record into the folder."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    contenders = {
        REFERENCE: torch_contender(plan.workload),
        EAGER: graphfsdp_contender(plan.workload, "none"),
        CAPTURED: graphfsdp_contender(plan.workload, "full_iteration"),
    }
    losses = {
        name: [contender() for _ in range(WARMUP_STEPS + 3)]
        for name, contender in contenders.items()
    }
    apart = max(
        float((own - base).abs())
        for name in contenders
        for own, base in zip(losses[name], losses[REFERENCE], strict=True)
    )
    if apart > LOSS_TOLERANCE:
        raise SystemExit(f"the contenders do not compute the same: losses differ by {apart}")
    seconds = interleave(contenders, plan.num_rounds, plan.num_steps, torch.device("cpu"))
    if rank == 0:
        record = {"speed": as_record(seconds, REFERENCE), "largest_loss_difference": apart}
        (pathlib.Path(folder) / "record").write_text(json.dumps(record))
    dist.barrier()
    os._exit(0)  # graphs and groups are still alive; nothing of theirs is worth an orderly end


def measure(plan: Plan, num_ranks: int) -> dict[str, object]:
    """Measure one workload on fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            measure_on_rank, (num_ranks, folder, plan), num_ranks
        )
        record = json.loads((pathlib.Path(folder) / "record").read_text())
    workload = plan.workload
    return {
        "name": workload.name,
        "kind": plan.kind,
        "goal": plan.goal,
        "num_ranks": num_ranks,
        "threads_per_rank": 1,
        "batch_per_rank": workload.shape,
        "num_parameters": sum(p.numel() for p in make_gpt(workload).parameters()),
        "num_rounds": plan.num_rounds,
        "steps_per_window": plan.num_steps,
        **record,
    }


def median_ratio(result: dict[str, object], name: str) -> float:
    """Return how many times as fast as the reference a contender is."""
    speed = result["speed"]
    assert isinstance(speed, dict)
    return float(speed[name]["speedup"]["median"])


def table_of(results: Sequence[dict[str, object]]) -> Table:
    """Return the results for a terminal."""
    table = Table(title="ZeRO-3 on gloo ranks of this CPU, paired with PyTorch's fully_shard")
    table.add_column("workload")
    table.add_column("contender")
    for heading in ("ms/step", "times as fast: median (min to max)", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        speed = result["speed"]
        assert isinstance(speed, dict)
        for name in CONTENDERS:
            ratio = speed[name]["speedup"]
            table.add_row(
                f"{result['name']}, {result['kind']}" if name == REFERENCE else "",
                name,
                f"{speed[name]['step_ms']:.2f}",
                str(Spread(**ratio)) if ratio else "1",
                f"{result['goal']}" if name == CAPTURED else "",
                end_section=name == CAPTURED,
            )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding", description=__doc__)
    names = [plan.workload.name for plan in PLANS]
    parser.add_argument("--only", choices=names, action="append", help="a workload; repeatable")
    parser.add_argument("--rounds", type=int, help="rounds instead of each workload's own number")
    parser.add_argument("--ranks", type=int, default=2)
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
            rounds = options.rounds or plan.num_rounds
            chosen = Plan(plan.workload, plan.kind, plan.goal, rounds, plan.num_steps)
            results.append(measure(chosen, options.ranks))
    console.print(table_of(results))
    geometric = statistics.geometric_mean([median_ratio(result, CAPTURED) for result in results])
    console.print(f"geometric mean of the captured ratios: {geometric:.2f}")
    document = {
        "kind": "sharding_cpu",
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
