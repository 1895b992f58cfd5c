"""Paired speed of captured small models of many architectures on one thread of this CPU.

Against two references: a plain PyTorch loop (AdamW(fused=True), clip_grad_norm_), which is what
people have, and ``scope="none"``, which is the captured code run eagerly, bit for bit.

Prints a table and writes ``zoo_speed.json`` into the directory that OUT names (default
benchmarks/results). ``python -m benchmarks.readme_table`` puts the numbers into the README.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import graphfsdp
from benchmarks import environment
from benchmarks.timing import interleave, speedups
from benchmarks.zoo_models import Architecture, architectures
from graphfsdp.bench.spread import Spread
from graphfsdp.optim import FusedAdam

RESULT_NAME = "zoo_speed.json"
SCOPES = ("none", "full_iteration")
PYTORCH = "pytorch"
RATIOS = ("speedup_over_pytorch", "speedup")
NUM_BATCHES = 4
WARM_UP = 8  # calls: three warm-ups, the capture, and replays until Python has specialised


class Contender:
    """One architecture under one scope."""

    def __init__(self, architecture: Architecture, scope: str) -> None:
        torch.manual_seed(0)
        self.model = architecture.make()
        optimizer = FusedAdam(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.step = graphfsdp.capture(self.model, optimizer, scope=scope, max_grad_norm=1.0)
        generator = torch.Generator().manual_seed(1)
        batches = [architecture.batch(generator) for _ in range(NUM_BATCHES)]
        self._batches = itertools.cycle(batches)

    def __call__(self) -> Tensor:
        """Train one step on the next batch and return its loss."""
        loss: Tensor = self.step(*next(self._batches))
        return loss


class PlainLoop:
    """One architecture in a training loop of PyTorch alone."""

    def __init__(self, architecture: Architecture) -> None:
        torch.manual_seed(0)
        self._model = architecture.make()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-3, weight_decay=0.1, fused=True
        )
        generator = torch.Generator().manual_seed(1)
        batches = [architecture.batch(generator) for _ in range(NUM_BATCHES)]
        self._batches = itertools.cycle(batches)

    def __call__(self) -> Tensor:
        """Train one step on the next batch and return its loss."""
        loss: Tensor = self._model(*next(self._batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def measure(architecture: Architecture, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Time one architecture, and check that both scopes train alike."""
    contenders = {scope: Contender(architecture, scope) for scope in SCOPES}
    plain = PlainLoop(architecture)
    state = torch.get_rng_state()
    losses = []
    for contender in contenders.values():
        torch.set_rng_state(state)
        losses.append(torch.stack([contender() for _ in range(WARM_UP)]))
    for _ in range(WARM_UP):
        plain()
    runs: dict[str, Callable[[], object]] = {PYTORCH: plain, **contenders}
    seconds = interleave(runs, num_rounds, num_steps, torch.device("cpu"))
    report = contenders["full_iteration"].step.report()
    for contender in contenders.values():
        contender.step.close()
    spread = speedups(seconds, "none")["full_iteration"]
    over_pytorch = speedups(seconds, PYTORCH)["full_iteration"]
    return {
        "num_parameters": sum(p.numel() for p in contenders["none"].model.parameters()),
        "num_ops": report.num_ops,
        "num_nodes": report.num_nodes,
        "pytorch_ms": statistics.median(seconds[PYTORCH]) * 1e3,
        "eager_ms": statistics.median(seconds["none"]) * 1e3,
        "replay_ms": statistics.median(seconds["full_iteration"]) * 1e3,
        "speedup": dataclasses.asdict(spread),
        "speedup_over_pytorch": dataclasses.asdict(over_pytorch),
        "equal": torch.equal(*losses),
    }


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """Return the results for a terminal."""
    table = Table(title="full_iteration against eager, one thread")
    table.add_column("architecture")
    headings = ("operators", "PyTorch ms", "eager ms", "replay ms", "over PyTorch", "over eager")
    for heading in (*headings, "bit-equal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result["name"],
            str(result["num_ops"]),
            f"{result['pytorch_ms']:.2f}",
            f"{result['eager_ms']:.2f}",
            f"{result['replay_ms']:.2f}",
            str(Spread(**result["speedup_over_pytorch"])),
            str(Spread(**result["speedup"])),
            "yes" if result["equal"] else "NO",
        )
    return table


def geometric_mean(results: Sequence[dict[str, Any]], ratio: str) -> float:
    """Return the geometric mean of the medians of one kind of ratio."""
    return statistics.geometric_mean(result[ratio]["median"] for result in results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    found = architectures()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo_speed", description=__doc__)
    parser.add_argument("--only", choices=list(found), action="append", help="repeatable")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="steps in a window")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    load_average = os.getloadavg()[0]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = []
    try:
        for name in options.only or found:
            console.print(f"measuring {name} ...", style="dim")
            results.append({"name": name, **measure(found[name], options.rounds, options.steps)})
    finally:
        torch.set_num_threads(num_threads)
    console.print(table_of(results))
    means = {ratio: geometric_mean(results, ratio) for ratio in RATIOS}
    console.print(f"geometric means: {means}")
    document = {
        "kind": "zoo_speed",
        "environment": environment.describe(torch.device("cpu")),
        "load_average_before": load_average,
        "num_rounds": options.rounds,
        "steps_per_window": options.steps,
        "geometric_mean": means,
        "architectures": results,
    }
    path = environment.output_directory() / RESULT_NAME
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"wrote {path}", soft_wrap=True)
    return 0 if all(result["equal"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
