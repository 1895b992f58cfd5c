"""How long a capture takes by the number of its nodes: ``python -m benchmarks.capture_nodes``.

A chain of small operators is trained on. The processor time of the call that captures it is that of
as many nodes on a GPU, of as many operators on a CPU; captures are linear where a node of the
largest takes as long as one of the smallest. On a GPU that needs a driver that tells the number of
nodes at once, and lists them in the order in which they came. Above the stand-in for a driver
CUDA_STAND_IN_KERNELS=none keeps the computing out of the times.
"""

import gc
import sys
import time
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import graphfsdp
from benchmarks.rows import parser_for, tell
from graphfsdp._capture.cuda.recorder import find_driver
from graphfsdp.bench.results import Row
from graphfsdp.optim import FusedAdam

# Runs of each, of which the least counts: small ones are noisy.
SIZES = {1_000: 5, 5_000: 2, 20_000: 1, 60_000: 1}
NODES_OF_A_LINK = 3  # sin; and cos, mul for its gradient
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


def node_us(num_nodes: int, device: torch.device) -> float:
    """Return the time for each node of a capture of about so many, the launch included."""
    model = Chain(max(num_nodes // NODES_OF_A_LINK, 1)).to(device)
    x = torch.ones(8, device=device)
    with graphfsdp.capture(model, FusedAdam(model.parameters()), warmup_steps=1) as step:
        step(x)
        start = time.process_time()
        step(x)
        capture_s = time.process_time() - start
        step(x)  # a graph that cannot be replayed is none
        facts = step.report()
        count = facts.num_ops if facts.num_nodes is None else facts.num_nodes
        assert count is not None, step.phase
    return capture_s / count * 1e6


def driver_rows(num_nodes: int) -> list[Row]:
    """Return what a recorder relies on: see its Note [Kernels by operator]."""
    driver, x = find_driver(), torch.ones(8, device="cuda")
    assert driver is not None
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    appends, listed, count_s = True, b"", []
    x.sin()
    with torch.cuda.graph(graph):
        handle = driver.capturing_graph(torch.cuda.current_stream().cuda_stream)
        assert handle is not None
        for number in range(1, num_nodes + 1):
            x = x.sin()
            if number % (num_nodes // 20) == 0:
                start = time.perf_counter()
                driver.count(handle)
                count_s.append(time.perf_counter() - start)
                nodes = (driver.nodes(handle) or array("Q")).tobytes()
                appends, listed = appends and nodes.startswith(listed), nodes
    least, most = min(count_s[:5]) * 1e6, min(count_s[-5:]) * 1e6
    text = f"{least:.1f} us where there are few, {most:.1f} us where there are {num_nodes:,}"
    return [
        {"what": "the driver lists nodes as they came", "result": str(appends), "ok": appends},
        {"what": "how many nodes there are", "result": text, "ok": most < 2 * least + 10},
    ]


def measure(sizes: Mapping[int, int], device: torch.device) -> list[Row]:
    node_us(10, device)  # imports, kernels
    gc.collect()
    gc.freeze()  # a capture collects garbage, and what imports left costs the same each time
    found = {
        size: min(node_us(size, device) for _ in range(num_runs))
        for size, num_runs in sizes.items()
    }
    rows: list[Row] = [
        {"what": f"a capture of {size:,} nodes", "result": f"{us:.1f} us for each", "ok": True}
        for size, us in found.items()
    ]
    ratio = found[max(found)] / found[min(found)]
    text = f"{ratio:.2f} times as long as of the smallest"
    rows.append({"what": "a node of the largest", "result": text, "ok": ratio < MOST_GROWTH})
    return [*rows, *(driver_rows(max(sizes)) if device.type == "cuda" else ())]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_for("capture_nodes", __doc__).parse_args(arguments)
    return tell(measure(SIZES, torch.device(options.device)), options.out)


if __name__ == "__main__":
    sys.exit(main())
