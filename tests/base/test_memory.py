"""Memory: interval colouring, where a CPU program computes, flat buffers, what the host has."""

import functools
import mmap
import pathlib
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cpu_recording import PoisoningBackend, record
from cuda_stand_in import library
from graphfsdp._capture.cpu.memory import ALIGNMENT_BYTES, Arena, Lifetime, plan_memory
from graphfsdp.base.memory import (
    VECTOR_BYTES,
    FlatBuffer,
    advise_huge_pages,
    available_bytes,
    copy_all,
    is_dense,
    zeros_flat,
)

CPU = torch.device("cpu")


@st.composite
def lifetimes(draw: st.DrawFn) -> list[Lifetime]:
    found = []
    for _ in range(draw(st.integers(0, 40))):
        start = draw(st.integers(0, 30))
        found.append(Lifetime(start, start + draw(st.integers(0, 12)), draw(st.integers(0, 5000))))
    return found


@given(lifetimes())
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


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(st.lists(shapes, max_size=6), st.sampled_from(DTYPES))
def test_views_lie_apart_aligned_and_inside(
    wanted: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    buffer = FlatBuffer([torch.empty(shape) for shape in wanted], dtype=dtype, device=CPU)
    assert [tuple(view.shape) for view in buffer.views] == wanted
    taken: set[int] = set()
    for view in buffer.views:
        offset = int(view.storage_offset())
        places = set(range(offset, offset + view.numel()))
        assert not places & taken
        taken |= places
        assert offset * dtype.itemsize % VECTOR_BYTES == 0
        assert view.dtype == dtype
        assert view.untyped_storage().data_ptr() == buffer.flat.untyped_storage().data_ptr()
    assert max(taken, default=-1) < buffer.flat.numel()
    padding = buffer.flat.numel() - len(taken)
    assert padding * dtype.itemsize < VECTOR_BYTES * max(len(wanted), 1)
    assert buffer.num_bytes == buffer.flat.numel() * dtype.itemsize


@given(shapes, st.randoms(use_true_random=False), st.sampled_from([1, 2, 0]))
def test_dense_strides_are_kept_and_others_become_contiguous(
    shape: tuple[int, ...], random: object, step: int
) -> None:
    """Permuted; with gaps, or over each other."""
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    permuted = torch.empty(shape).permute(order)
    strides = [step * stride for stride in permuted.stride()]
    places = torch.arange(1000).as_strided(permuted.shape, strides)
    fills = sorted(places.flatten().tolist()) == list(range(places.numel()))
    is_kept = is_dense(places.shape, places.stride())
    assert is_kept == fills or not places.numel()
    (view,) = FlatBuffer([places], dtype=torch.float32, device=CPU).views
    assert view.shape == places.shape
    assert view.stride() == places.stride() if is_kept else view.is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not library.is_below(), reason="launches are counted by the stand-in")
def test_small_tensors_are_copied_by_one_kernel_and_large_ones_by_one_each() -> None:
    """With others a large one would take several launches of the kernel for many."""
    numels = (7, 30_000_000, 300, 44_000_000)
    sources = [torch.randn(numel, device="cuda").bfloat16() for numel in numels]
    targets = [torch.zeros(numel, device="cuda") for numel in numels]
    before = library.counts()
    copy_all(targets, sources)
    assert library.counts().since(before).launches == 3
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.float())


LARGE = 5 * 2**20


@pytest.mark.parametrize("lacks", ["the advice", "huge pages"])
def test_without_huge_pages_memory_is_torch_s(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if lacks == "the advice":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    assert not zeros_flat(LARGE, torch.float32, torch.device("cpu")).any()
    advise_huge_pages(torch.empty(LARGE).untyped_storage())


def is_advised(address: int) -> bool:
    """Tell from what Linux says of this process whether huge pages were asked for there."""
    mapped = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            mapped = start <= address < end
        elif mapped and first == "VmFlags:":
            return "hg" in line.split()
    return False


@pytest.mark.skipif(
    not pathlib.Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this system has no huge pages to share out",
)
def test_large_memory_is_advised_also_when_a_programs_pool_has_grown() -> None:
    zeros = zeros_flat(LARGE, torch.float32, torch.device("cpu"))
    assert is_advised(zeros.data_ptr() + (8 << 20))
    arena = Arena()
    for num_bytes in (48 << 20, 160 << 20):
        pool = arena.reserve(num_bytes)
        assert is_advised(pool.data_ptr() + num_bytes // 2)
    small = torch.zeros(16)
    advise_huge_pages(small.untyped_storage())
    assert small.sum() == 0


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_that_machine_and_control_groups_leave_is_shared_by_ranks(
    version: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_bytes(tmp_path) is None
    assert (available_bytes() or 1) > 0
    limit, used, cached = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    line, base = {
        1: ("4:memory:/jobs/one", tmp_path / "sys" / "fs" / "cgroup" / "memory"),
        2: ("0::/jobs/one", tmp_path / "sys" / "fs" / "cgroup"),
    }[version]
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    assert available_bytes(tmp_path) == 1000 << 10
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"7:cpu:/other\n{line}\n")
    (base / "jobs" / "one").mkdir(parents=True)
    (base / "jobs" / "one" / limit).write_text("max" if version == 2 else str(1 << 62))
    (base / "jobs" / "one" / used).write_text("5")
    (base / "jobs" / limit).write_text("900000")
    (base / "jobs" / used).write_text("500000")
    (base / "jobs" / "memory.stat").write_text(f"anon 3\n{cached} 100000\n")
    assert available_bytes(tmp_path) == 500_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_bytes(tmp_path) == 125_000
