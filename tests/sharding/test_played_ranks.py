"""ZeRO-3 as one of eight ranks on one device: what overlaps, and peak memory beside FSDP2.

One GPU cannot hold two ranks of NCCL, so the other ranks are played.
"""

import functools
import gc
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile

import graphfsdp
from cuda_stand_in.library import is_below
from graphfsdp.bench.workloads import find_workload
from graphfsdp.data import BYTES_VOCAB_SIZE
from graphfsdp.training.gpt import GPT
from played_group import played_ranks

NUM_RANKS = 8
NUM_WARMUP = 4
NUM_PROFILED = 3
NUM_AGAIN = 20
# Of communication must run beside computation, where it may.
LEAST_HIDDEN = 0.25
# Peaks of graphfsdp may exceed FSDP2's by this factor.
MEMORY_TOLERANCE = 1.05
FSDP2, PLAIN, CAPTURED = "torch fully_shard", "one after the other", "overlap, captured"
VARIANTS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {PLAIN: {"overlap": False}, "overlap": {}, CAPTURED: {}}
)
Span = tuple[float, float]


@dataclass(frozen=True)
class Measured:
    """Of a training; without a GPU that can be timed there is but the loss."""

    loss: float
    peak_bytes: int = 0
    spans: tuple[Span, ...] = ()  # of all kernels
    communication: float = 0.0  # how long it ran, where streams tell it from the rest

    def hidden(self, communication: float) -> float:
        """Share of so much communication that ran beside computation.

        The kernels of a graph are not on the streams that they were captured on.
        """
        return (sum(end - begin for begin, end in self.spans) - length(self.spans)) / communication


def length(spans: Iterable[Span]) -> float:
    """Return how much time some spans cover, none of it twice."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def is_measured(device: torch.device) -> bool:
    return device.type == "cuda" and not is_below()


@functools.cache
def measure(variant: str, device: torch.device, name: str) -> Measured:
    with played_ranks(NUM_RANKS):
        return train(variant, device, name)


def train(variant: str, device: torch.device, name: str) -> Measured:
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    torch.manual_seed(0)
    workload = find_workload(name)
    model = workload.make().to(device)
    assert isinstance(model, GPT)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        if variant == FSDP2:
            torch_fully_shard(module, mesh=mesh)
        else:
            graphfsdp.fully_shard(module, mesh, **VARIANTS[variant])  # type: ignore[arg-type]
    size = (workload.batch_size, workload.items_per_sample)
    tokens = torch.randint(BYTES_VOCAB_SIZE, size, device=device)
    # torch's own is capturable on accelerators only.
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=on_gpu)
    captured = None
    if variant == CAPTURED:
        captured = graphfsdp.capture(model, optimizer, warmup_steps=NUM_WARMUP - 1)

    def step() -> Tensor:
        if captured is not None:
            return captured(tokens, tokens)  # type: ignore[no-any-return]
        loss: Tensor = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    try:
        losses = [step() for _ in range(NUM_WARMUP + 2)]
        found = Measured(float(losses[-1]))
        if is_measured(device):
            peak_bytes = torch.cuda.max_memory_allocated(device) - before
            found = Measured(found.loss, peak_bytes, *kernels_of(step))
    finally:
        if captured is not None:
            captured.close()
    return found


def kernels_of(step: Callable[[], Tensor]) -> tuple[tuple[Span, ...], float]:
    """Return when kernels ran, and how long those did that the busiest stream did not run."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(NUM_PROFILED):
            step()
        torch.cuda.synchronize()
    by_stream: dict[int, list[Span]] = {}
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            span = (event.time_range.start, event.time_range.end)
            by_stream.setdefault(event.device_resource_id, []).append(span)
    computation = max(by_stream.values(), key=length)
    others = [span for spans in by_stream.values() if spans is not computation for span in spans]
    return (*others, *computation), length(others)


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sharded_training_overlaps_and_takes_no_more_memory_than_fsdp2(
    variant: str, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    name = "gpt2-124m" if is_measured(device) else "gpt-tiny"
    base, plain, own = (measure(each, device, name) for each in (FSDP2, PLAIN, variant))
    if is_below():  # where two trainings differ in last bits as well, FSDP2's eager ones too
        assert math.isclose(own.loss, plain.loss, rel_tol=1e-6)
    else:
        assert own.loss == plain.loss
    if not is_measured(device):
        return
    ratio = own.peak_bytes / base.peak_bytes
    hidden = own.hidden(measure("overlap", device, name).communication)
    record_property(
        f"{name}, ZeRO-3, one of {NUM_RANKS} ranks, the others played: {variant}",
        f"peak {own.peak_bytes / 2**20:.0f} MiB, {ratio:.2f} of FSDP2's, "
        f"{hidden:.0%} of communication beside computation "
        f"(FSDP2's {base.hidden(base.communication):.0%})",
    )
    # A graph keeps what it was recorded with, so the captured one is told, not judged.
    assert ratio <= MEMORY_TOLERANCE or variant == CAPTURED
    assert hidden >= LEAST_HIDDEN or variant == PLAIN


@pytest.mark.time_limit(300)
def test_captured_overlap_trains_the_same_each_time(device: torch.device) -> None:
    """What nothing puts in order shows in one of many trainings, if at all."""
    with played_ranks(NUM_RANKS):
        num_runs = NUM_AGAIN if is_measured(device) else 2
        losses = [train(CAPTURED, device, "gpt-tiny").loss for _ in range(num_runs)]
    assert set(losses) == {losses[0]}


def test_how_much_communication_runs_beside_computation() -> None:
    communication, computation = ((0.0, 4.0), (8.0, 9.0)), ((1.0, 2.0), (3.5, 8.5))
    assert Measured(0.0, 0, (*communication, *computation)).hidden(5.0) == (1.0 + 0.5 + 0.5) / 5.0
