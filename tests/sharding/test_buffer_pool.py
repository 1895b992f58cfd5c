"""The pool of whole buffers: fixed places within the interval bound, and safe in every order."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphfsdp.sharding.buffer_pool import ALIGNMENT_BYTES, BufferPool, PoolStats
from graphfsdp.sharding.module import unit_of
from overlap_helpers import NUM_BLOCKS, inputs, make_stack, patient_pools
from ranks import RankPool, on_ranks
from sharding_helpers import (
    STRATEGIES,
    adam,
    assert_same_training,
    buffers,
    make_net,
    train,
)

CPU = torch.device("cpu")
BOUND = 1.1  # the pool over the most bytes alive at a time


# ---------------------------------------------------------------- the pool alone


class Program:
    """An iteration that takes and drops buffers, each filled with its own number while it lives."""

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.held: dict[int, tuple[Tensor, int]] = {}
        self.next = 0

    def take(self, owner: int, numel: int) -> int:
        tensor = self.pool.take(owner, numel, torch.float32, CPU)
        assert tensor.shape == (numel,)
        self.next += 1
        tensor.fill_(self.next)
        self.held[self.next] = (tensor, self.next)
        return self.next

    def check(self) -> None:
        for tensor, number in self.held.values():
            assert bool((tensor == number).all()), "somebody else has written there"

    def drop(self, number: int) -> None:
        self.check()
        del self.held[number]


def nested(program: Program, sizes: list[int]) -> None:
    """The buffers of ZeRO-3 one unit ahead: forward, then backward with two gradients alive."""
    program.pool.begin(trains=True)
    count = len(sizes)
    ahead = program.take(0, sizes[0])
    for index in range(count):
        here = ahead
        if index + 1 < count:
            ahead = program.take(index + 1, sizes[index + 1])
        program.drop(here)
    ahead = program.take(count - 1, sizes[-1])
    grads: list[int] = []
    for index in reversed(range(count)):
        here = ahead
        if index:
            ahead = program.take(index - 1, sizes[index - 1])
        if len(grads) == 2:
            program.drop(grads.pop(0))
        grads.append(program.take(100 + index, sizes[index]))
        program.drop(here)
    for grad in grads:
        program.drop(grad)
    program.pool.end()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 24).flatmap(
        lambda count: st.one_of(
            st.lists(st.integers(1, 4000), min_size=count, max_size=count),
            st.integers(1, 4000).map(lambda size: [3 * size, *[size] * count, 2 * size]),
        )
    )
)
def test_the_pool_of_an_iteration_is_within_a_tenth_of_the_bound(sizes: list[int]) -> None:
    pool = BufferPool()
    program = Program(pool)
    for _ in range(4):
        nested(program, sizes)
    stats = pool.stats
    assert stats.num_plans == 1
    assert stats.num_misses == 0
    assert stats.num_hits == 2 * (3 * len(sizes))
    assert stats.peak_bytes <= stats.num_bytes <= BOUND * stats.peak_bytes
    exact = max(sizes) * 4
    assert exact <= stats.peak_bytes


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=14),
        min_size=2,
        max_size=8,
    ),
    st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_no_order_ever_lets_two_buffers_share_memory(
    iterations: list[list[tuple[int, int]]], trains: list[bool]
) -> None:
    """Any owner asks at any time, and drops the buffer any number of requests later, or never."""
    pool = BufferPool()
    program = Program(pool)
    for index, requests in enumerate(iterations):
        pool.begin(trains=trains[index])
        ends: dict[int, int] = {}
        for step, (owner, length) in enumerate(requests):
            for number in [number for number, end in ends.items() if end == step]:
                program.drop(number)
            ends[program.take(owner, 16 * (owner + 1))] = step + 1 + length
            program.check()
        for number in list(program.held)[1:]:  # one stays until the end of everything
            program.drop(number)
        pool.end()


def test_what_outlives_the_iteration_shares_no_memory() -> None:
    pool = BufferPool()
    program = Program(pool)
    kept = None
    for _ in range(4):
        pool.begin(trains=True)
        if kept is not None:
            program.drop(kept)
        kept = program.take(0, 256)
        for owner in (1, 2, 3):
            program.drop(program.take(owner, 256))
        program.check()
        pool.end()
    assert pool.stats.num_plans == 1
    assert pool.stats.num_misses == 0
    assert pool.stats.num_bytes == pool.stats.peak_bytes == 2 * 256 * 4


def test_an_alias_that_somebody_keeps_is_never_overwritten() -> None:
    pool = BufferPool()
    aliases = []
    for index in range(6):
        pool.begin(trains=True)
        for owner in range(3):
            tensor = pool.take(owner, 64, torch.float32, CPU).fill_(10 * index + owner)
            if owner == index % 3:
                aliases.append((tensor.view(8, 8)[2:].t(), 10 * index + owner))
            del tensor
        pool.end()
        for alias, value in aliases:
            assert bool((alias == value).all())


def test_another_dtype_or_size_is_allocated_and_planned_anew() -> None:
    pool = BufferPool()
    for dtype, numel in [(torch.float32, 64)] * 3 + [(torch.bfloat16, 64)] * 3:
        pool.begin(trains=True)
        tensor = pool.take("owner", numel, dtype, CPU)
        assert (tensor.dtype, tensor.numel()) == (dtype, numel)
        assert tensor.data_ptr() % 64 == 0
        del tensor
        pool.end()
    # The second dtype is planned from the iteration after the first one that did not fit.
    assert pool.stats == PoolStats(ALIGNMENT_BYTES, ALIGNMENT_BYTES, 2, 1, 0)
    empty = pool.take("owner", 0, torch.float32, CPU)
    assert empty.numel() == 0


def test_orders_that_never_repeat_are_planned_ever_more_rarely() -> None:
    pool = BufferPool()
    for index in range(64):
        pool.begin(trains=True)
        tensors = [pool.take((index, owner), 64, torch.float32, CPU) for owner in range(3)]
        del tensors
        pool.end()
    assert 3 <= pool.stats.num_plans <= 10


def test_the_memory_goes_with_the_last_buffer() -> None:
    pool = BufferPool()
    for _ in range(3):
        pool.begin(trains=True)
        tensor = pool.take(0, 4096, torch.float32, CPU)
        pool.end()
    tensor.fill_(7.0)
    reference = StorageWeakRef(tensor.untyped_storage())
    assert pool.stats.num_hits
    del pool
    gc.collect()
    assert bool((tensor == 7.0).all()), "who holds a buffer holds its memory"
    del tensor
    assert reference.expired()


# ---------------------------------------------------------------- models


@patient_pools()
def pooled_runs(strategy: str, microbatches: int) -> list[PoolStats]:
    """Train eagerly with pool and without, and captured with it: bit for bit the same."""
    stats, runs = [], []
    for scope, pooled in (("none", False), ("none", True), ("full_iteration", True)):
        model = make_net(strategy, dropout=0.3, buffer_pool=pooled)
        torch.manual_seed(3)
        runs.append(train(model, adam(model), scope=scope, microbatches=microbatches))
        pool = unit_of(model).schedule.pool
        stats.append(pool.stats)
        assert pool._kept == [], "a plan goes with the graph that it was captured with"
    for other in runs[1:]:
        assert_same_training(runs[0], other)
    assert stats[0].num_hits == 0
    return stats


@pytest.mark.parametrize(
    ("strategy", "microbatches"),
    [("optim", 3), ("optim_grads_params", 1)],
)
def test_a_pool_changes_no_bit(ranks2: RankPool, strategy: str, microbatches: int) -> None:
    for _, eager, captured in ranks2.run(pooled_runs, strategy, microbatches):
        assert eager.num_plans >= 1
        assert eager.num_hits > 5 * eager.num_misses
        if ranks2.device_type == "cpu":
            assert captured.num_hits == 0, "on a CPU the program plans all of its memory"


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pool_changes_no_bit_on_gpus(gpu_ranks: RankPool, strategy: str) -> None:
    gpu_ranks.run(pooled_runs, strategy, 3)


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks("ranks2")
@patient_pools()
def test_the_pool_of_a_model_is_bounded(overlap: bool) -> None:
    """Not by the number of blocks: two or one gathered ahead, two gradients, and the root's."""
    model = make_stack(overlap=overlap, buffer_pool=True)
    for x in inputs(8):
        model(x).backward()
        model.zero_grad()
    largest = max(buffer.layout.total_numel * 4 for buffer in buffers(model))
    stats = unit_of(model).schedule.pool.stats
    assert stats.num_bytes <= BOUND * stats.peak_bytes
    block = -(-largest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    small = 4 * ALIGNMENT_BYTES  # weights and gradients of the root, in two buffers
    assert stats.num_bytes <= (4 if overlap else 2) * block + small
    assert NUM_BLOCKS * 2 * block > stats.num_bytes
    # gloo's threads may hold a buffer a little longer than we do.
    assert stats.num_misses <= stats.num_hits // 10


class Operators(TorchDispatchMode):
    """Notes operators, and the sizes that are allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_empty = func is torch.ops.aten.empty.memory_format
        self.calls.append((str(func), str(args[:1]) if is_empty else ""))
        return func(*args, **(kwargs or {}))


class NoDLPack(TorchFunctionMode):
    """Refuses what the rules of a capture on a GPU refuse."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not Tensor.__dlpack__
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_warmups", [2, 3, 5])
@on_ranks("ranks1")
@patient_pools()
def test_a_capture_on_a_gpu_is_served_as_the_last_warm_up(num_warmups: int) -> None:
    """Both run the same operators, and nothing is planned inside the capture."""
    model = make_stack(buffer_pool=True)
    model.prepare_shards()
    pool = unit_of(model).schedule.pool
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        # Tensors lie on the CPU here, where memory of its own is left to the recording.
        patch.setattr("graphfsdp.sharding.buffer_pool._is_recorded_on_cpu", lambda device: False)
        for index, x in enumerate(inputs(num_warmups + 1)):
            captures, before = index == num_warmups, pool.stats
            patch.setattr("graphfsdp.sharding.buffer_pool.is_capturing", lambda it=captures: it)
            with Operators() as mode, NoDLPack():
                model(x).backward()
            model.zero_grad()
            runs.append(mode.calls)
    assert runs[-1] == runs[-2]
    assert pool.stats.num_plans == before.num_plans
    assert (pool.stats.num_hits > before.num_hits) == (num_warmups > 2)
    assert (pool.stats.num_misses > before.num_misses) == (num_warmups <= 2)
