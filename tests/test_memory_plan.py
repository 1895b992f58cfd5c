"""Interval colouring, and the fixed memory that a CPU program computes in."""

import functools
from itertools import pairwise

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from graphfsdp._capture import choose_backend
from graphfsdp._capture.cpu_graph import CpuGraphBackend
from graphfsdp._capture.memory_plan import ALIGNMENT_BYTES, Lifetime, plan_memory
from helpers import check_against_eager
from recording import record
from zoo import ZOO

CPU = torch.device("cpu")


@st.composite
def lifetimes(draw: st.DrawFn) -> list[Lifetime]:
    found = []
    for _ in range(draw(st.integers(0, 40))):
        start = draw(st.integers(0, 30))
        found.append(Lifetime(start, start + draw(st.integers(0, 12)), draw(st.integers(0, 5000))))
    return found


@hypothesis.given(lifetimes())
def test_buffers_that_live_at_a_time_do_not_overlap(buffers: list[Lifetime]) -> None:
    plan = plan_memory(buffers)
    for step in range(45):
        alive = sorted(
            (offset, offset + buffer.num_bytes)
            for buffer, offset in zip(buffers, plan.offsets, strict=True)
            if buffer.start <= step <= buffer.end and buffer.num_bytes
        )
        assert all(first[1] <= second[0] for first, second in pairwise(alive))
        assert sum(end - offset for offset, end in alive) <= plan.peak_bytes <= plan.num_bytes
    for buffer, offset in zip(buffers, plan.offsets, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert offset + buffer.num_bytes <= plan.num_bytes


def test_the_last_step_of_a_buffer_may_not_be_the_first_of_its_heir() -> None:
    plan = plan_memory([Lifetime(0, 2, 64), Lifetime(2, 3, 64), Lifetime(3, 3, 64)])
    assert plan.offsets[0] != plan.offsets[1]
    assert plan.offsets[0] == plan.offsets[2]
    assert plan.num_bytes == plan.peak_bytes == 128


def test_activations_of_a_deep_network_are_packed_without_loss() -> None:
    """Forward results live until their own backward; gradients are passed on at once."""
    depth = 50
    forward = [Lifetime(i, 2 * depth - i, 1000 + 64 * (i % 7)) for i in range(depth)]
    backward = [Lifetime(depth + i, depth + i + 1, 3000 - 64 * (i % 5)) for i in range(depth)]
    plan = plan_memory(forward + backward)
    assert plan.num_bytes <= 1.03 * plan.peak_bytes


def test_a_replay_allocates_only_what_it_returns() -> None:
    x = torch.randn(64, 64)

    def iterate() -> list[Tensor]:
        y = torch.relu(x * x.t()) + 1
        y[1:, ::2].mul_(2)
        return [y.reshape(32, 128).tanh().sum(1).sum()]

    graph, _ = record(iterate)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = graph.replay()
    events = profile.profiler.kineto_results.events()
    allocated = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
    assert allocated
    assert max(allocated) <= 8, "more than the result and numbers as operands"
    assert torch.equal(result[0], iterate()[0])
    assert 0 < graph.facts.pool_bytes <= 3 * 64 * 64 * 4


def test_constants_are_computed_once() -> None:
    x = torch.randn(4, 4)

    def iterate() -> list[Tensor]:
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        counts = torch.zeros(4)
        counts.add_(1)  # written: each replay starts anew
        return [torch.where(mask, x, 0.0) + counts]

    graph, _ = record(iterate)
    for _ in range(3):
        x.normal_()
        assert torch.equal(graph.replay()[0], x.tril() + 1)
    assert graph.facts.num_calls == 4  # where, zero_, add_, add


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every program overwrite its dead memory."""
    backend = functools.partial(CpuGraphBackend, poisons=True)
    monkeypatch.setattr(choose_backend, "CpuGraphBackend", backend)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ZOO)
def test_nothing_reads_memory_after_its_planned_life(name: str) -> None:
    check_against_eager(ZOO[name], CPU, microbatches=2, max_grad_norm=0.05)


def test_poison_reaches_a_reader_of_dead_memory() -> None:
    """What a kept view of a planned tensor shows after a replay is poison."""
    x = torch.ones(100)
    graph, _ = record(lambda: [(x * 2).sum().mul(2)], nn.Identity(), poisons=True)
    assert graph.replay()[0].item() == 400
    namespace = graph._replay.__globals__  # type: ignore[union-attr]
    planned = [v for k, v in namespace.items() if k.startswith("x") and v.shape == (100,)]
    assert any(tensor.isnan().all() for tensor in planned if tensor is not x)
