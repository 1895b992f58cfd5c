"""NCCL's collectives in a CUDA graph equal those that are issued eagerly, bit for bit.

With buffers that NCCL registers in captures and without: captures alone register, and that is where
they hang (capture/cuda/graph.py). Each rank is a process of its own, each test a job.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forked_programs import forked
from graphfsdp.base.collectives import (
    all_gather_,
    all_reduce_,
    all_to_all_,
    broadcast_,
    reduce_scatter_,
)

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

NUM_RANKS = 2
# Short messages go another way than long ones, and hang (NVIDIA/nccl#2389) in this order.
SIZES = (2_048, 2 << 20)
DTYPES = (torch.float32, torch.bfloat16)
Collective = Callable[[Tensor, dist.ProcessGroup], list[Tensor]]


def all_gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    output = x.new_empty(NUM_RANKS * len(x))
    all_gather_(output, x, group)
    return [output]


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    outputs = {reduction: x.new_empty(len(x) // NUM_RANKS) for reduction in ("mean", "sum")}
    for reduction, output in outputs.items():
        reduce_scatter_(output, x, group, reduction=reduction)
    return [*outputs.values()]


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    outputs = {reduction: x.clone() for reduction in ("mean", "sum", "max")}
    for reduction, output in outputs.items():
        all_reduce_(output, group, reduction=reduction)
    return [*outputs.values()]


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    output = torch.empty_like(x)
    all_to_all_(output.view(NUM_RANKS, -1), x.view(NUM_RANKS, -1), group)
    return [output]


def broadcast(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    output = x.clone()
    broadcast_(output, group, source=1)
    return [output]


def compare(rank: int, folder: str, collective: Collective) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "nccl", init_method=store, rank=rank, world_size=NUM_RANKS, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    inputs = [torch.empty(size, dtype=dtype, device=device) for dtype in DTYPES for size in SIZES]

    def issue() -> list[Tensor]:
        return [output for x in inputs for output in collective(x, group)]

    issue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = issue()
    torch.manual_seed(rank)
    alike: list[bool] = []
    for _ in range(3):
        for x in inputs:
            x.normal_()
        eager = issue()
        graph.replay()
        pairs = zip(eager, replayed, strict=True)
        alike += [torch.equal(*pair) and bool(pair[0].count_nonzero()) for pair in pairs]
    graph.reset()  # before its communicator, which would wait for it
    dist.destroy_process_group()
    assert all(alike), alike  # only now, since the other rank would wait for this one


@pytest.mark.parametrize("registers", ["0", "1"])
@pytest.mark.parametrize(
    "collective", [all_gather, reduce_scatter, all_reduce, all_to_all, broadcast]
)
def test_collectives_in_a_graph_equal_eager_ones(
    collective: Collective, registers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", registers)
    with ExitStack() as stack:
        started = [
            stack.enter_context(forked(compare, rank, str(tmp_path), collective))
            for rank in range(NUM_RANKS)
        ]
        for process in started:
            ended = process.ended()
            assert ended.returncode == 0, ended.stdout + ended.stderr
