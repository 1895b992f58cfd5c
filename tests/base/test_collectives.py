"""Our collectives as operators, alone and in CUDA graphs; the norm on one rank."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from forked_programs import forked
from graphfsdp.base.collectives import (
    Transfer,
    all_gather_,
    all_reduce_,
    all_to_all_,
    broadcast_,
    reduce_scatter_,
)
from ranks import on_ranks, rank_device, world_group
from sharding_helpers import raises_on_rank

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def of_rank(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small integers, exact in every dtype and in every order of additions."""
    return (torch.arange(numel, device=rank_device()) % 5 + rank).to(dtype)


def mine(numel: int, dtype: torch.dtype) -> Tensor:
    return of_rank(dist.get_rank(), numel, dtype)


@pytest.mark.parametrize(
    "ranks", ["ranks2", "ranks4", pytest.param("gpu_ranks", marks=pytest.mark.gpu)]
)
@on_ranks()
def test_results_are_right() -> None:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    for dtype in DTYPES:
        whole = torch.full((3 * num_ranks,), -1, dtype=dtype, device=rank_device())
        all_gather_(whole, mine(3, dtype), world_group())
        assert torch.equal(whole, torch.cat([of_rank(r, 3, dtype) for r in range(num_ranks)]))
        inputs = [of_rank(r, 4 * num_ranks, dtype).double() for r in range(num_ranks)]
        total = torch.stack(inputs).sum(0)
        for reduction, expected in (("sum", total), ("mean", total / num_ranks)):
            part = torch.full((4,), -1, dtype=dtype, device=rank_device())
            reduce_scatter_(part, mine(4 * num_ranks, dtype), world_group(), reduction=reduction)
            assert torch.equal(part, expected[4 * rank : 4 * rank + 4].to(dtype)), dtype
            tensor = mine(4 * num_ranks, dtype)
            all_reduce_(tensor, world_group(), reduction=reduction)
            assert torch.equal(tensor, expected.to(dtype)), dtype
        tensor = mine(7, dtype)
        all_reduce_(tensor, world_group(), reduction="max")
        assert torch.equal(tensor, of_rank(num_ranks - 1, 7, dtype))
        broadcast_(tensor.fill_(rank), world_group(), source=num_ranks - 1)
        assert torch.equal(tensor, torch.full_like(tensor, num_ranks - 1))
    empty = torch.empty(0, device=rank_device())
    all_gather_(empty, empty.clone(), world_group())
    reduce_scatter_(empty, empty.clone(), world_group())


@on_ranks("ranks4")
def test_gloo_adds_in_the_order_of_ranks_and_gathers_long_and_short_alike() -> None:
    """The sum is the same whatever lies beside it, which no ring of gloo promises."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()

    def random_of(source: int, numel: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(source))

    for numel in (1, 5, 300_000):  # the last is gathered by the ring
        inputs = [random_of(r, numel * num_ranks) for r in range(num_ranks)]
        parts = [each[numel * rank : numel * (rank + 1)] for each in inputs]
        added = parts[0].clone()
        for part in parts[1:]:
            added += part
        shard, whole = torch.empty(numel), torch.empty(numel * num_ranks)
        reduce_scatter_(shard, inputs[rank], world_group(), reduction="sum")
        assert torch.equal(shard, added)
        scattered = Transfer(shard.zero_(), inputs[rank])
        reduce_scatter_(shard, inputs[rank], world_group(), transfer=scattered)
        gathered = Transfer(whole, inputs[rank])
        all_gather_(whole, inputs[rank][:numel], world_group(), transfer=gathered)
        scattered.wait()
        assert torch.equal(shard, added / num_ranks)
        gathered.wait()
        assert torch.equal(whole, torch.cat([each[:numel] for each in inputs]))
        with raises_on_rank(KeyError, "under_way"):
            gathered.wait()


@pytest.mark.parametrize("size", [0.0, 1.0, 6e4], ids=["nothing", "usual", "squares overflow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_whole_gradients_have_torchs_norm(size: float, dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(5, 3), (7,), (), (0, 2)]
    model = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).clamp(-1, 1).mul(size).to(dtype) if size else None
    squares = [param.grad.double().square().sum() for param in model if param.grad is not None]
    got = graphfsdp.clip_grad_norm_(model, 1e9)
    assert got.dtype == torch.float32
    assert got.shape == ()
    assert got.item() == pytest.approx(math.sqrt(sum(map(float, squares))), rel=2e-6)


def test_clipping_refuses_a_limit_that_is_not_positive_and_a_list() -> None:
    with pytest.raises(graphfsdp.ConfigError, match="max_norm must be a positive number, got 0"):
        graphfsdp.clip_grad_norm_(nn.Linear(2, 2), 0.0)
    with pytest.raises(graphfsdp.ConfigError, match=r"got list.*clip_grad_norm_\(model"):
        graphfsdp.clip_grad_norm_([*nn.Linear(2, 2).parameters()], 1.0)  # type: ignore[arg-type]


# In CUDA graphs with buffers that NCCL registers in captures and without: captures alone register,
# and that is where they hang (capture/ranks/nccl_settings.py). Each rank is a process of its own,
# each test a job.
NUM_RANKS = 2
DTYPES_IN_GRAPHS = (torch.float32, torch.bfloat16)
# Short messages go another way than long ones, and hang (NVIDIA/nccl#2389) in this order.
SIZES = (2_048, 2 << 20)
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
    inputs = [
        torch.empty(size, dtype=dtype, device=device)
        for dtype in DTYPES_IN_GRAPHS
        for size in SIZES
    ]

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


@pytest.mark.gpu
@pytest.mark.multi_gpu
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
