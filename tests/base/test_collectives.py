"""Our collectives as operators, how many of them an iteration issues, and the pool of ranks."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import graphfsdp
from graphfsdp.base.collectives import all_gather_, all_reduce_, broadcast_, reduce_scatter_
from helpers import OpNames
from ranks import RankError, RankPool, rank_device
from sharding_helpers import (
    STRATEGIES,
    adam,
    batches,
    buffers,
    make_net,
    my_part,
    raises_on_rank,
    train,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def group() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def mine(numel: int, dtype: torch.dtype) -> Tensor:
    """Small integers, exact in every dtype and in every order of additions."""
    values = torch.arange(numel, device=rank_device()) % 5 + dist.get_rank()
    return values.to(dtype)


def of_rank(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(numel, device=rank_device()) % 5 + rank).to(dtype)


def right_results() -> None:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    for dtype in DTYPES:
        whole = torch.full((3 * num_ranks,), -1, dtype=dtype, device=rank_device())
        all_gather_(whole, mine(3, dtype), group())
        assert torch.equal(whole, torch.cat([of_rank(r, 3, dtype) for r in range(num_ranks)]))
        inputs = [of_rank(r, 4 * num_ranks, dtype).double() for r in range(num_ranks)]
        total = torch.stack(inputs).sum(0)
        for reduction, expected in (("sum", total), ("mean", total / num_ranks)):
            part = torch.full((4,), -1, dtype=dtype, device=rank_device())
            reduce_scatter_(part, mine(4 * num_ranks, dtype), group(), reduction=reduction)
            assert torch.equal(part, expected[4 * rank : 4 * rank + 4].to(dtype)), dtype
            tensor = mine(4 * num_ranks, dtype)
            all_reduce_(tensor, group(), reduction=reduction)
            assert torch.equal(tensor, expected.to(dtype)), dtype
        tensor = mine(7, dtype)
        all_reduce_(tensor, group(), reduction="max")
        assert torch.equal(tensor, of_rank(num_ranks - 1, 7, dtype))
        broadcast_(tensor.fill_(rank), group(), source=num_ranks - 1)
        assert torch.equal(tensor, torch.full_like(tensor, num_ranks - 1))
    empty = torch.empty(0, device=rank_device())
    all_gather_(empty, empty.clone(), group())
    reduce_scatter_(empty, empty.clone(), group())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_results_are_right(request: pytest.FixtureRequest, num_ranks: int) -> None:
    request.getfixturevalue(f"ranks{num_ranks}").run(right_results)


@pytest.mark.gpu
def test_results_are_right_on_gpus(gpu_ranks: RankPool) -> None:
    gpu_ranks.run(right_results)


def seen_operators() -> list[str]:
    """Every collective is one operator of ours; nothing of c10d is seen beside it."""
    tensor, whole = mine(4, torch.float32), mine(8, torch.float32)
    with OpNames() as seen:
        all_gather_(whole, tensor, group())
        reduce_scatter_(tensor, whole, group())
        all_reduce_(tensor, group())
        broadcast_(tensor, group())
    return list(seen.names)


def test_a_collective_is_one_operator(ranks2: RankPool) -> None:
    expected = [f"graphfsdp.{op}_.default" for op in ("all_gather", "reduce_scatter", "all_reduce")]
    for names in ranks2.run(seen_operators):
        assert names == [*expected, "graphfsdp.broadcast_.default"]


def refused_arguments() -> list[str]:
    memory = torch.zeros(8, device=rank_device())
    with raises_on_rank(graphfsdp.ConfigError) as aliased:
        reduce_scatter_(memory[:4], memory, group())
    with raises_on_rank(graphfsdp.ConfigError) as unknown:
        all_reduce_(memory, group(), reduction="median")
    return aliased + unknown


def test_wrong_arguments_are_refused_before_anything_is_sent(ranks2: RankPool) -> None:
    for aliased, unknown in ranks2.run(refused_arguments):
        assert "lies in its own input" in aliased
        assert "'median'" in unknown
        assert "mean" in unknown


@dataclass(frozen=True)
class Counts:
    """Collectives of one iteration, and the buffers that they serve.

    Buffers of 0-D parameters, and all with no_shard, are whole on every rank.
    """

    gathers: int
    scatters: int
    reduces: int
    sharded: int  # trainable
    whole: int  # trainable
    frozen: int


def counted(strategy: str, microbatches: int, reshard: bool) -> Counts:
    model = make_net(strategy, reshard_after_forward=reshard)
    got = train(model, adam(model), num_steps=4, microbatches=microbatches)
    assert got.report is not None
    counts = got.report.op_counts
    assert counts["graphfsdp.fused_adam_.default"] == 1
    assert not [key for key in counts if "c10d" in key]
    trainable = buffers(model, trainable=True)
    gathers, scatters, reduces = (
        counts.get(f"graphfsdp.{op}_.default", 0)
        for op in ("all_gather", "reduce_scatter", "all_reduce")
    )
    return Counts(
        gathers,
        scatters,
        reduces,
        sharded=sum(buffer.sharded for buffer in trainable),
        whole=sum(not buffer.sharded for buffer in trainable),
        frozen=sum(buffer.sharded for buffer in buffers(model, trainable=False)),
    )


def expected_counts(
    strategy: str, microbatches: int, reshard: bool, got: Counts
) -> tuple[int, int, int]:
    """All-gathers, reduce-scatters and all-reduces; one all-reduce is the norm's."""
    everything = got.sharded + got.frozen
    if strategy == "no_shard":
        return 0, 0, got.whole
    if strategy == "optim":
        return everything, got.sharded, got.whole + 1
    reduces = microbatches * got.whole + 1
    if strategy == "optim_grads":
        return everything, microbatches * got.sharded, reduces
    # Nothing saves the frozen parameter, so backward gathers the trainable buffers only.
    again = got.sharded if reshard else 0
    return microbatches * (everything + again), microbatches * got.sharded, reduces


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "kept"])
def test_collectives_of_an_iteration(ranks2: RankPool, strategy: str, microbatches: int) -> None:
    reshard = strategy != "kept"
    name = strategy if reshard else "optim_grads_params"
    for got in ranks2.run(counted, name, microbatches, reshard):
        assert got.sharded + got.whole >= 4
        assert (got.sharded == 0) == (name == "no_shard")
        expected = expected_counts(name, microbatches, reshard, got)
        assert (got.gathers, got.scatters, got.reduces) == expected


def with_evaluation() -> int:
    """ZeRO-2 gathers anew after each optimizer step, and only then."""
    model = make_net("optim_grads")
    optim = adam(model)
    batch = my_part(batches(1)[0])
    with OpNames() as seen:
        for _ in range(2):
            model(*batch).backward()
            optim.step()
            optim.zero_grad()
        model(*batch)
    num_sharded = sum(buffer.sharded for buffer in buffers(model))
    return list(seen.names).count("graphfsdp.all_gather_.default") - 3 * num_sharded


def test_every_forward_after_a_step_gathers_once(ranks2: RankPool) -> None:
    assert ranks2.run(with_evaluation) == [0, 0]


def fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def sleeps() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        dist.barrier()


def my_rank() -> int:
    return dist.get_rank()


def test_the_pool_reports_a_failure_and_a_hang_and_goes_on() -> None:
    pool = RankPool(2)
    with contextlib.closing(pool):
        with pytest.raises(RankError, match=r"rank 1 failed:(.|\n)*rank one is unwell"):
            pool.run(fails_on_rank_1)
        with pytest.raises(RankError, match=r"rank 1 did not end(.|\n)*in sleeps"):
            pool.run(sleeps, limit_s=2)
        assert pool.run(my_rank) == [0, 1]
