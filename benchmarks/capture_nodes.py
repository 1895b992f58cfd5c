"""How long a capture takes by the number of its nodes: ``python -m benchmarks.capture_nodes``.

A chain of small operators is trained on, forward and backward, three nodes for each link. One call
of the step captures it; its processor time (of all threads, the launch included) is measured, the
least of some captures, beside that of an iteration that runs eagerly under the same step. Where
captures are linear, the time for a node is that of a capture of any size: the ratio in the last
row, of the largest size to the smallest, is near 1. On a GPU the nodes are those of the CUDA
graph; on a CPU they are operators of the recording. Above the stand-in for a driver
CUDA_STAND_IN_KERNELS=none keeps the computing out of the times.
"""

import gc
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import graphfsdp
from benchmarks.rows import parser_for, tell
from graphfsdp.bench.results import Row
from graphfsdp.optim import FusedAdam

SIZES = (1_000, 5_000, 20_000, 60_000)
NODES_OF_A_LINK = 3  # sin; and cos, mul for its gradient
REPEATED_NODES = 10_000  # as many nodes as this are captured again, since small ones are noisy
MOST_GROWTH = 2.0  # of the time for a node; it was 10 and more when it was quadratic


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


def _processor_s(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def captured_once(num_nodes: int, device: torch.device) -> tuple[float, float, int]:
    """Capture about so many nodes; return seconds of the capture and of eager, and the count."""
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
    return capture_s, eager_s, count


def measure(sizes: Sequence[int], device: torch.device) -> list[Row]:
    captured_once(10, device)  # imports, kernels
    gc.collect()
    gc.freeze()  # a capture collects garbage, and what imports left costs the same each time
    rows: list[Row] = []
    node_us = {}
    for size in sizes:
        num_runs = max(1, min(REPEATED_NODES // size, 5))
        capture_s, eager_s, count = min(captured_once(size, device) for _ in range(num_runs))
        node_us[count] = capture_s / count * 1e6
        text = f"{capture_s:.3f} s of processor, {node_us[count]:.1f} us for a node; an eager "
        text += f"iteration {eager_s:.3f} s"
        rows.append({"what": f"a capture of {count:,} nodes", "result": text, "ok": True})
    ratio = node_us[max(node_us)] / node_us[min(node_us)]
    text = f"{ratio:.2f} times as long as of the smallest"
    rows.append({"what": "a node of the largest", "result": text, "ok": ratio < MOST_GROWTH})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_for("capture_nodes", __doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES, help="sizes of captures")
    options = parser.parse_args(arguments)
    return tell(measure(options.nodes, torch.device(options.device)), options.out)


if __name__ == "__main__":
    sys.exit(main())
