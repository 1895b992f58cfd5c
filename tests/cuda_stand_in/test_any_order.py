"""Captured steps in every order that their graphs allow, plain loops in every interleaving.

Pipelines among them, also with a rank that fails.

A GPU shows a missing dependency once in a thousand runs, if at all. The stand-in launches the
nodes of a graph in random orders that their dependencies allow, and runs streams lazily, in random
orders that respect their events: whatever is missing changes the numbers. What does not change
them by chance is found by the memory that nodes touch (`_no_races` in tests/conftest.py).
"""

import functools
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphfsdp
import pipeline_models
from cuda_stand_in import library
from cuda_stand_in.orders import NUM_ORDERS, assert_any_order, chosen
from faults_at_operators import Fault, FaultMode, InjectedError
from graphfsdp import Phase
from helpers import Batch, set_lr
from hidden_count import Unseen
from make_step import make_step
from moe_models import experts_on_ranks
from parallel_models import TP_AXES, part_of_axis, tensor_parallel
from pipeline_models import KINDS, modules_of, schedule_of
from ranks import RankError, RankPool, on_ranks, rank_device
from recomputing_models import Recomputing
from sharding_helpers import (
    MAX_NORM,
    STRATEGIES,
    Block,
    Net,
    Training,
    adam,
    assert_equal_tensors,
    assert_same_training,
    batches,
    full_parameters,
    hybrid_mesh,
    learning_rate,
    make_net,
    my_part,
    shard,
    train,
)
from zoo import ZOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not library.is_below(), reason="needs the stand-in: make cuda-test"),
]

NUM_EAGER = 3  # the capture is the first launch
NUM_STEPS = NUM_EAGER + 3
OVERLAP: dict[str, Any] = {"overlap": True, "reshard_after_forward": True}


def sharded(strategy: str, scope: str, num_steps: int, **options: Any) -> Training:
    model = make_net(strategy, dropout=0.3, **options)
    torch.manual_seed(10 + dist.get_rank())
    return train(model, adam(model), scope=scope, num_steps=num_steps, microbatches=2)


def recomputing(way: str) -> Any:
    torch.manual_seed(0)
    model = Recomputing(way, dropout=0.3).to(rank_device())
    return shard(model, "optim_grads_params", **OVERLAP)


@functools.cache
def other_groups() -> tuple[Any, Any]:
    return dist.new_group(), dist.new_group()


class Contexts(Block):
    """Sees what all ranks have, by collectives of two more communicators, one long under way."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = other_groups()
        under_way = functional.all_reduce(x.detach().square().mean(), "avg", one)
        with warnings.catch_warnings():  # newer torch has one name for both
            warnings.simplefilter("ignore", FutureWarning)
            of_all = functional.all_gather_tensor_autograd(x, gather_dim=0, group=other)
        mean = of_all.view(dist.get_world_size(), *x.shape).mean(0)
        out: Tensor = super().forward(x + 0.1 * mean) * (1 + under_way)
        return out


def with_contexts(strategy: str) -> Any:
    torch.manual_seed(0)
    model = Net()
    model.blocks.extend([Contexts(8), Contexts(8)])
    return shard(model.to(rank_device()), strategy, **OVERLAP)


class OnTwoStreams(Net):
    """Its blocks are two towers, each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend([Block(8) for _ in range(4)])
        self.streams = [torch.cuda.Stream() for _ in range(2)]

    def logits(self, tokens: Tensor) -> Tensor:
        hidden, current = self.embedding(tokens), torch.cuda.current_stream()
        found = []
        for number, stream in enumerate(self.streams):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                tower = hidden
                for block in self.blocks[number::2]:
                    tower = block(tower)
            found.append(tower)
        for stream, tower in zip(self.streams, found, strict=True):
            current.wait_stream(stream)
            tower.record_stream(current)
        out: Tensor = self.head(sum(found)) * self.scale
        return out


def on_two_streams() -> Any:
    torch.manual_seed(0)
    return shard(OnTwoStreams().to(rank_device()), "optim_grads_params", **OVERLAP)


MOVING: dict[str, Any] = {"bias_update_rate": 0.01, "capacity_factor": 1.5, "recomputes": True}
MODELS: dict[str, Callable[[], Any]] = {
    **{
        f"{strategy} overlapped": functools.partial(make_net, strategy, 0.3, **OVERLAP)
        for strategy in STRATEGIES
    },
    "in turn": functools.partial(make_net, "optim_grads_params", 0.3, overlap=False),
    "recompute blocks": functools.partial(recomputing, "block_ours"),
    "recompute parts": functools.partial(recomputing, "part_ours"),
    "contexts, ZeRO-2": functools.partial(with_contexts, "optim_grads"),
    "contexts, ZeRO-3": functools.partial(with_contexts, "optim_grads_params"),
    "two streams": on_two_streams,
    "hybrid": functools.partial(
        make_net, "optim_grads_params", outer_strategy="no_shard", **OVERLAP
    ),
    "hybrid, both axes cut": functools.partial(
        make_net, "optim_grads", outer_strategy="optim", **OVERLAP
    ),
    "tensor parallel": functools.partial(tensor_parallel, "optim_grads"),
    "tensor parallel, cut sequences": functools.partial(tensor_parallel, sequence=True),
    "exchanged tokens": functools.partial(experts_on_ranks, 2, "optim_grads_params", **MOVING),
}


def part_for(name: str, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not name.startswith("tensor parallel"):
        return my_part(batch)
    part = part_of_axis(batch, hybrid_mesh((2, 2), TP_AXES), "dp")
    return tuple(tensor.to(rank_device()) for tensor in part)


def in_any_order(
    make: Callable[[], tuple[Any, torch.optim.Optimizer]],
    calls: list[Batch],
    num_orders: int = NUM_ORDERS,
    **options: Any,
) -> str:
    """Compare replays in order with eager steps, those in other orders with them; return races."""
    library.take_races()
    runs = []
    for scope in ("none", "full_iteration"):
        model, optim = make()
        torch.manual_seed(10 + dist.get_rank())
        with graphfsdp.capture(
            model, optim, scope=scope, max_grad_norm=MAX_NORM, **options
        ) as step:
            found: list[Any] = []
            for index, call in enumerate(calls):
                set_lr(optim, learning_rate(index))
                found += [step(*call.args, **call.kwargs), step.grad_norm]
            module = model if isinstance(model, nn.Module) else nn.ModuleList(modules_of(model))
            runs.append([*found, *full_parameters(module).values()])
            if step.phase is Phase.REPLAY:
                assert_any_order(step, seed=1 + dist.get_rank(), num_orders=num_orders)
    assert_equal_tensors(*runs)
    return library.take_races()


def sharded_in_any_order(name: str) -> str:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = MODELS[name]()
        return model, adam(model)

    calls = [Batch(part_for(name, batch)) for batch in batches(NUM_STEPS)]
    return in_any_order(make, calls, microbatches=3)


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("name", MODELS)
def test_sharded_steps_replay_in_any_order(name: str, gpu_ranks4: RankPool) -> None:
    assert gpu_ranks4.run(sharded_in_any_order, name, limit_s=250) == [""] * 4


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


def interleaved_towers(seeds: range) -> None:
    runs = []
    for seed in (0, *seeds):
        model = on_two_streams()
        optim = adam(model)
        losses = []
        for index, part in enumerate(map(my_part, batches(4))):
            # The first one gathers nothing ahead: each tower on its stream, in no common order.
            with chosen(streams=seed) if seed and index else nullcontext():
                losses.append(model(*part))
                losses[-1].backward()
                optim.step()
                optim.zero_grad()
                torch.cuda.synchronize()
        runs.append([*losses, *full_parameters(model).values()])
        assert_equal_tensors(runs[0], runs[-1])


@pytest.mark.time_limit(300)
def test_units_on_two_streams_run_in_any_interleaving(gpu_ranks: RankPool) -> None:
    """What was gathered or freed on one stream is waited for on the other."""
    gpu_ranks.run(interleaved_towers, range(1, 21), limit_s=250)


def races_without_a_wait() -> str:
    """Leave out the second wait of a capture: later ones join the stream all the same.

    Before the first one nothing has run that it could be late for.
    """
    wait_event = torch.cuda.Stream.wait_event
    captured = Unseen(*range(10_000))

    def wait_unless(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        is_ours = sys._getframe(1).f_code.co_name == "_wait"  # of graphfsdp.base.collectives
        captures = is_ours and torch.cuda.is_current_stream_capturing()
        if not captures or next(captured) != 1:
            wait_event(stream, event)

    library.take_races()
    with mock.patch.object(torch.cuda.Stream, "wait_event", wait_unless):
        sharded("optim_grads_params", "full_iteration", NUM_EAGER + 1, **OVERLAP)
    assert next(captured) > 2
    return library.take_races()


@pytest.mark.time_limit(300)
def test_a_wait_that_is_left_out_of_a_graph_is_named(gpu_ranks: RankPool) -> None:
    """So these tests can fail."""
    races = gpu_ranks.run(races_without_a_wait, limit_s=250)[0]
    assert "(ncclDevKernel_" in races
    assert "neither waits for the other" in races


@pytest.mark.parametrize("name", ZOO)
def test_steps_of_one_device_replay_in_any_order(name: str) -> None:
    device, generator = torch.device("cuda", 0), torch.Generator().manual_seed(5)
    step, *_ = make_step(device, name, max_grad_norm=1.0, microbatches=2)
    with step:
        for _ in range(NUM_EAGER + 1):
            batch = ZOO[name].batch(generator).to(device)
            step(*batch.args, **batch.kwargs)
        assert_any_order(step)


def pipeline_in_any_order(name: str, inner: str | None) -> str:
    options: dict[str, Any] = {"dropout": 0.2}
    if inner is not None:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "inner"))
        cut = (
            pipeline_models.tensor_parallel(mesh["inner"])
            if inner == "tensor"
            else pipeline_models.data_parallel(mesh["inner"], inner)
        )
        options = {"group": mesh.get_group("pp"), "shard": cut}

    def make() -> tuple[Any, torch.optim.Optimizer]:
        schedule = schedule_of(KINDS[name], **options)
        return schedule, pipeline_models.adam(schedule)

    pairs = map(pipeline_models.batch, range(NUM_STEPS))
    return in_any_order(make, [Batch((x,), {"target": target}) for x, target in pairs], 20)


@pytest.mark.parametrize("name", KINDS)
def test_two_stages_replay_in_any_order(name: str, gpu_ranks: RankPool) -> None:
    assert gpu_ranks.run(pipeline_in_any_order, name, None) == [""] * 2


@pytest.mark.parametrize(
    ("name", "inner"), [("1f1b", "optim_grads_params"), ("interleaved", "tensor")]
)
def test_stages_that_are_parallel_in_themselves_replay_in_any_order(
    name: str, inner: str, gpu_ranks4: RankPool
) -> None:
    assert gpu_ranks4.run(pipeline_in_any_order, name, inner) == [""] * 4


@pytest.mark.parametrize(
    ("name", "index", "num_ops"),
    [("interleaved", 1, 40), ("gpipe", 5, 0)],
    ids=["warm-up", "replay"],
)
def test_a_rank_that_fails_frees_the_others(name: str, index: int, num_ops: int) -> None:
    # Launches of a replay come back at once, as on a GPU: what they have put on streams waits.
    launches = functools.partial(chosen, streams=1) if index > 4 else nullcontext
    pipeline_models.check_failing_rank(RankPool(2, "cuda"), name, index, num_ops, launches)


def losses_of_a_run(*, fails: bool) -> list[Tensor]:
    """Train; the last rank may fail in the middle of the capture, which then comes a call later."""
    schedule = schedule_of(KINDS["1f1b"], dropout=0.2)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    losses = []
    torch.manual_seed(7)
    with graphfsdp.capture(schedule, pipeline_models.adam(schedule), max_grad_norm=0.5) as step:
        for index in range(NUM_STEPS):
            x, target = pipeline_models.batch(index)
            if fails and index == 3:
                fault = FaultMode(90, Fault.ERROR, after=False) if is_last else nullcontext()
                with pytest.raises((InjectedError, graphfsdp.CaptureError)) as caught, fault:
                    step(x, target=target)
                assert is_last or "rank 1 of 2 failed in iteration 4: Inj" in str(caught.value)
            losses.append(step(x, target=target))
        assert step.phase is Phase.REPLAY
    return losses


@on_ranks("gpu_ranks")
def test_ranks_go_on_after_a_capture_that_failed_on_one() -> None:
    assert_equal_tensors(losses_of_a_run(fails=False), losses_of_a_run(fails=True))


def issue_in_other_orders(folder: Path) -> None:
    rank = dist.get_rank()
    tensors = [torch.ones(4 + index, device=f"cuda:{rank}") for index in range(2)]
    with (folder / str(rank)).open("w") as file:
        os.dup2(file.fileno(), 2)  # the pool is thrown away behind it
        for tensor in tensors if rank == 0 else reversed(tensors):
            dist.all_reduce(tensor)


def test_ranks_that_issue_other_collectives_are_named(tmp_path: Path, gpu_ranks: RankPool) -> None:
    with pytest.raises(RankError):
        gpu_ranks.run(issue_in_other_orders, tmp_path)
    said = "".join(file.read_text() for file in tmp_path.iterdir())
    assert "do not issue the same collectives" in said
    assert "AllReduce of 4 elements" in said
    assert "AllReduce of 5 elements" in said
