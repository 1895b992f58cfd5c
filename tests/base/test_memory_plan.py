"""Interval colouring, and the fixed memory that a CPU program computes in."""

import functools
from collections.abc import Callable
from itertools import pairwise

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from cpu_recording import PoisoningBackend, record
from graphfsdp.base.memory_plan import ALIGNMENT_BYTES, Lifetime, plan_memory

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


def test_constants_are_new_in_each_replay() -> None:
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


def _whole(x: Tensor, grad: Tensor) -> Tensor:
    return grad.copy_((x * 2).t()).sum()


def _read_before(x: Tensor, grad: Tensor) -> Tensor:
    y = x * 2
    total = grad[1].sum()
    grad.copy_(y.t())
    return total


def _written_before(x: Tensor, grad: Tensor) -> Tensor:
    y = x * 2
    grad[0, 0] = 7
    kept = grad[0, 0].clone()
    grad.copy_(y.t())
    return kept


def _used_after(x: Tensor, grad: Tensor) -> Tensor:
    y = x * 2
    grad.copy_(y.t())
    grad.add_(1)
    return (y + grad.t()).sum()


def _part(x: Tensor, grad: Tensor) -> Tensor:
    y = torch.cat([x, x])
    grad.copy_(y[:4].t())
    return y.sum()


def _other_strides(x: Tensor, grad: Tensor) -> Tensor:
    return grad.copy_((x * 2).t().contiguous()).sum()


def _other_dtype(x: Tensor, grad: Tensor) -> Tensor:
    return grad.copy_((x.double() * 2).t()).sum()


def _twice(x: Tensor, grad: Tensor) -> Tensor:
    first, second = x * 2, x * 3
    total = grad.copy_(first.t()).sum()
    return total + grad.copy_(second.t())[0].sum()


@pytest.mark.parametrize("poisons", [False, True])
@pytest.mark.parametrize(
    ("program", "num_copies"),
    [
        *((_whole, 0), (_read_before, 1), (_written_before, 1), (_used_after, 1), (_part, 1)),
        *((_other_strides, 1), (_other_dtype, 2), (_twice, 1)),
    ],
)
def test_a_result_is_computed_where_it_was_to_be_copied_if_nobody_can_tell(
    program: Callable[[Tensor, Tensor], Tensor], num_copies: int, poisons: bool
) -> None:
    x, grad = torch.randn(4, 5), torch.zeros(5, 4).t().contiguous().t()
    expected = grad.clone()
    graph, _ = record(lambda: [program(x, grad)], poisons=poisons, scratch=[grad])
    program(x.clone(), expected)
    nodes = graph.facts.program.nodes if graph.facts.program else ()
    called = [node.op for node in nodes if node.called]
    copying = ("aten.copy_.default", "aten._to_copy.default")
    assert sum(op in copying for op in called) == num_copies
    for _ in range(3):
        x.normal_()
        grad.normal_()
        expected = grad.clone(memory_format=torch.preserve_format)
        result = program(x.clone(), expected)
        assert torch.equal(graph.replay()[0], result)
        assert torch.equal(grad, expected)


def test_what_a_failed_replay_must_put_back_is_written_by_its_own_copy() -> None:
    x, state = torch.randn(16, 4), torch.zeros(16, 4)
    graph, _ = record(lambda: [state.copy_(x * 2).sum()])
    assert graph.facts.program is not None
    assert sum(node.called for node in graph.facts.program.nodes) == 3


def test_programs_of_one_backend_share_their_memory() -> None:
    backend = PoisoningBackend(CPU)
    x, graphs = torch.randn(8, 8), []

    def iterate(size: int) -> list[Tensor]:
        big = x.repeat(size, size).sin().mul_(torch.full((8 * size, 1), 2.0))
        return [big.sum(), torch.ones(3)]

    for size in (2, 8, 4):
        graph, _ = backend.record(
            functools.partial(iterate, size), nn.Identity(), print, collective=False, scratch=()
        )
        graphs.append((size, graph))
    pools = [graph.facts.pool_bytes for _, graph in graphs]
    assert pools[0] < pools[1] == pools[2]
    for _ in range(3):
        for size, graph in graphs:
            x.normal_()
            assert torch.equal(graph.replay()[0], iterate(size)[0])
    assert backend.arena.num_bytes == pools[1]
    for _, graph in graphs:
        graph.close()
    del graph, graphs
    assert backend.arena.num_bytes == 0, "closed programs hold memory"
