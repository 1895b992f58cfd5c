"""Our collectives as operators, how many of them an iteration issues; the norm on one rank."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp.base.collectives import (
    Transfer,
    all_gather_,
    all_reduce_,
    broadcast_,
    reduce_scatter_,
)
from helpers import OpNames
from overlap_helpers import short_up_to
from ranks import on_ranks, rank_device, world_group
from sharding_helpers import adam, batches, buffers, make_net, my_part, raises_on_rank

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
        with raises_on_rank(graphfsdp.PhaseError, "not under way"):
            gathered.wait()


@on_ranks("ranks2")
def test_every_forward_after_a_step_gathers_once() -> None:
    """ZeRO-2 gathers anew after each optimizer step, and only then."""
    model = make_net("optim_grads")
    optim = adam(model)
    batch = my_part(batches(1)[0])
    with OpNames() as seen, short_up_to(0):
        for _ in range(2):
            model(*batch).backward()
            optim.step()
            optim.zero_grad()
        model(*batch)
    num_sharded = sum(buffer.sharded for buffer in buffers(model))
    assert seen.names.count("graphfsdp.all_gather_.default") == 3 * num_sharded


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
