"""Captured steps in every order that their graphs allow, plain loops in every interleaving.

A GPU shows a missing dependency once in a thousand runs, if at all. The stand-in launches the
nodes of a graph in random orders that their dependencies allow, and runs streams lazily, in random
orders that respect their events: whatever is missing changes the numbers. What does not change
them by chance is found by the memory that nodes touch (`_no_races` in tests/conftest.py).
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cuda_stand_in import library
from helpers import assert_same_run, run
from ranks import RankError, RankPool
from sharding_helpers import (
    STRATEGIES,
    Training,
    adam,
    assert_same_training,
    make_net,
    train,
)
from zoo import ZOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not library.is_below(), reason="needs the stand-in: make cuda-test"),
]

NUM_ORDERS = 50
NUM_EAGER = 3  # the capture is the first launch


@contextlib.contextmanager
def chosen(**seeds: int) -> Iterator[None]:
    library.choose(**seeds)
    try:
        yield
    finally:
        library.choose()


def sharded(strategy: str, scope: str, num_steps: int, **options: Any) -> Training:
    model = make_net(strategy, dropout=0.3, **options)
    torch.manual_seed(10 + dist.get_rank())
    return train(model, adam(model), scope=scope, num_steps=num_steps, microbatches=2)


def in_any_order(strategy: str, options: dict[str, Any]) -> str:
    """Compare replays, each in another order on each rank, with eager steps; return the races."""
    num_steps = NUM_EAGER + NUM_ORDERS
    expected = sharded(strategy, "none", num_steps)
    library.take_races()
    with chosen(order=1 + dist.get_rank()):
        got = sharded(strategy, "full_iteration", num_steps, **options)
    assert_same_training(expected, got)
    return library.take_races()


OVERLAP = {"overlap": True, "reshard_after_forward": True}


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("options", [OVERLAP, {**OVERLAP, "buffer_pool": True}], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_steps_replay_in_any_order(
    strategy: str, options: dict[str, Any], gpu_ranks: RankPool
) -> None:
    if "buffer_pool" in options and strategy != "optim_grads_params":
        pytest.skip("only ZeRO-3 has a pool")
    races = gpu_ranks.run(in_any_order, strategy, options, limit_s=250)
    assert races == [""] * gpu_ranks.num_ranks


def interleaved(strategy: str, seeds: range) -> None:
    expected = sharded(strategy, "none", 3)
    for seed in seeds:
        with chosen(streams=seed):
            got = sharded(strategy, "none", 3, **OVERLAP)
        assert_same_training(expected, got)


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_loops_run_in_any_interleaving(strategy: str, gpu_ranks: RankPool) -> None:
    gpu_ranks.run(interleaved, strategy, range(1, 11), limit_s=250)


@contextlib.contextmanager
def without_waits(leaves_out: Callable[[int], bool]) -> Iterator[None]:
    """Leave out waits for collectives that are under way, by their numbers."""
    wait_event = torch.cuda.Stream.wait_event
    count = itertools.count()

    def wait_unless(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        is_ours = sys._getframe(1).f_code.co_name == "_wait"  # of graphfsdp.base.collectives
        if not is_ours or not leaves_out(next(count)):
            wait_event(stream, event)

    with mock.patch.object(torch.cuda.Stream, "wait_event", wait_unless):
        yield


def interleaved_without_waits() -> None:
    with without_waits(lambda number: True):
        interleaved("optim_grads_params", range(1, 11))


def races_without_a_wait() -> str:
    """Leave out the first wait of a capture: later ones join the stream all the same."""
    captured = itertools.count()

    def leaves_out(number: int) -> bool:
        return torch.cuda.is_current_stream_capturing() and next(captured) == 0

    library.take_races()
    with without_waits(leaves_out):
        sharded("optim_grads_params", "full_iteration", NUM_EAGER + 1, **OVERLAP)
    assert next(captured) > 2
    return library.take_races()


@pytest.mark.time_limit(300)
def test_waits_that_are_left_out_of_a_loop_are_seen(gpu_ranks: RankPool) -> None:
    """So these tests can fail: numbers differ, or collectives come in other orders."""
    with pytest.raises(RankError, match=r"differs|unspecified launch failure"):
        gpu_ranks.run(interleaved_without_waits, limit_s=250)


@pytest.mark.time_limit(300)
def test_a_wait_that_is_left_out_of_a_graph_is_named(gpu_ranks: RankPool) -> None:
    races = gpu_ranks.run(races_without_a_wait, limit_s=250)[0]
    assert "(ncclDevKernel_" in races
    assert "neither waits for the other" in races


@pytest.mark.parametrize("name", ["gpt", "conv_net", "lstm"])
def test_steps_of_one_device_replay_in_any_order(name: str) -> None:
    device = torch.device("cuda", 0)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "num_steps": NUM_EAGER + NUM_ORDERS}
    expected = run(ZOO[name], "none", device, **options)
    with chosen(order=1, streams=1):
        got = run(ZOO[name], "full_iteration", device, **options)
    assert_same_run(expected, got)


def issue_in_other_orders(folder: Path) -> None:
    rank = dist.get_rank()
    tensors = [torch.ones(4 + index, device=f"cuda:{rank}") for index in range(2)]
    with (folder / str(rank)).open("w") as file:
        os.dup2(file.fileno(), 2)  # the pool is thrown away behind it
        for tensor in tensors if rank == 0 else reversed(tensors):
            dist.all_reduce(tensor)


def test_ranks_that_issue_other_collectives_are_named(gpu_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        gpu_ranks.run(issue_in_other_orders, tmp_path)
    said = "".join(file.read_text() for file in tmp_path.iterdir())
    assert "do not issue the same collectives" in said
    assert "AllReduce of 4 elements" in said
    assert "AllReduce of 5 elements" in said
