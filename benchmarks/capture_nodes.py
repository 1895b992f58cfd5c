"""How long a capture takes by the number of its nodes: ``python -m benchmarks.capture_nodes``.

A chain of small operators is trained on, forward and backward, three nodes for each link. One call
of the step captures it; its processor time (of all threads, the launch included) is measured, the
least of some captures, beside that of an iteration that runs eagerly under the same step. Where
captures are linear, the time for a node is that of a capture of any size: the ratio in the last
line, of the largest size to the smallest, is near 1. On a GPU the nodes are those of the CUDA
graph; on a CPU they are operators of the recording. Above the stand-in for a driver
CUDA_STAND_IN_KERNELS=none keeps the computing out of the times.
"""

import argparse
import dataclasses
import gc
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from torch import Tensor, nn

import graphfsdp
from graphfsdp.bench.machine import find_environment
from graphfsdp.bench.results import Table
from graphfsdp.optim import FusedAdam

SIZES = (1_000, 5_000, 20_000, 60_000)
NODES_OF_A_LINK = 3  # sin; and cos, mul for its gradient
REPEATED_NODES = 10_000  # as many nodes as this are captured again, since small ones are noisy


class Chain(nn.Module):
    def __init__(self, num_links: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.num_links = num_links

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(self.num_links):
            x = x.sin()
        return x.sum()


@dataclasses.dataclass(frozen=True)
class Timed:
    num_nodes: int
    eager_s: float  # seconds of processor time, as below
    capture_s: float

    @property
    def us_per_node(self) -> float:
        return self.capture_s / self.num_nodes * 1e6


def _processor_s(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def captured_once(num_nodes: int, device: torch.device) -> Timed:
    """Capture an iteration of about so many nodes."""
    model = Chain(max(num_nodes // NODES_OF_A_LINK, 1)).to(device)
    x = torch.ones(8, device=device)
    with graphfsdp.capture(model, FusedAdam(model.parameters()), warmup_steps=2) as step:
        step(x)
        eager_s = _processor_s(lambda: step(x))
        capture_s = _processor_s(lambda: step(x))
        step(x)  # a graph that cannot be replayed is none
        facts = step.report()
        count = facts.num_ops if facts.num_nodes is None else facts.num_nodes
        assert count is not None, step.phase
    return Timed(count, eager_s, capture_s)


def timed(num_nodes: int, device: torch.device) -> Timed:
    runs = [
        captured_once(num_nodes, device) for _ in range(max(1, min(REPEATED_NODES // num_nodes, 5)))
    ]
    return min(runs, key=lambda run: run.capture_s)


def ratio_of(runs: Sequence[Timed]) -> float:
    """Return how much longer a node of the largest capture takes than one of the smallest."""
    ordered = sorted(runs, key=lambda run: run.num_nodes)
    return ordered[-1].us_per_node / ordered[0].us_per_node


def table_of(runs: Sequence[Timed], where: str) -> Table:
    rows = [
        (
            f"{run.num_nodes:,}",
            f"{run.eager_s:.3f}",
            f"{run.capture_s:.3f}",
            f"{run.us_per_node:.1f}",
        )
        for run in runs
    ]
    heading = ("nodes", "eager iteration, s", "capture, s", "us for a node")
    return Table(f"processor time of a capture on {where}", heading, rows, num_left=0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capture_nodes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES, help="sizes of captures")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the numbers")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    facts = find_environment(device)
    captured_once(10, device)  # imports, kernels
    gc.collect()
    gc.freeze()  # a capture collects garbage, and what imports left costs the same each time
    runs = []
    for num_nodes in options.nodes:
        runs.append(timed(num_nodes, device))
        print(f"{runs[-1].num_nodes:,} nodes: {runs[-1].capture_s:.3f} s", file=sys.stderr)
    Console(width=100).print(table_of(runs, facts["gpu"] or facts["cpu"]).rich())
    print(
        f"a node of the largest capture takes {ratio_of(runs):.2f} times as long as the smallest's"
    )
    if options.out is not None:
        document = {
            "kind": "capture_nodes",
            "environment": facts,
            "runs": [{**dataclasses.asdict(run), "us_per_node": run.us_per_node} for run in runs],
            "ratio": ratio_of(runs),
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
