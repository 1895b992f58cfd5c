"""The part of the GPU check that looks at ZeRO-3: what overlaps, and peak memory beside FSDP2.

One rank per GPU, two at the most, as processes of their own; on a CPU one gloo rank rehearses it,
where there is nothing to profile. Not run on a GPU yet.
"""

import json
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import graphfsdp
from benchmarks.workloads import Workload
from graphfsdp._fully_shard import unit_of
from graphfsdp.training.gpt import GPT

NUM_WARMUP = 4
NUM_PROFILED = 3
MAX_RANKS = 2
# Peaks of graphfsdp may exceed FSDP2's by this factor before the row is marked.
MEMORY_TOLERANCE = 1.05
VARIANTS = {
    "torch fully_shard": None,
    "one after the other": {"overlap": False},
    "overlap": {},
    "overlap and pool": {"buffer_pool": True},
}

Span = tuple[float, float]


def covered(spans: Iterable[Span], by: Iterable[Span]) -> float:
    """Return how much of some spans of time lies in others, counting no time twice."""
    others = _merged(by)
    total = 0.0
    for begin, end in _merged(spans):
        total += sum(max(0.0, min(end, high) - max(begin, low)) for low, high in others)
    return total


def length(spans: Iterable[Span]) -> float:
    """Return how much time some spans cover."""
    return sum(end - begin for begin, end in _merged(spans))


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _make_step(workload: Workload, device: torch.device, options: Any) -> Callable[[], Tensor]:
    """Return a training step without a graph; options None is PyTorch's own sharding."""
    torch.manual_seed(0)
    model: Any = GPT(workload.model).to(device)
    blocks: list[nn.Module] = list(model.blocks)
    if options is None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*blocks, model):
            torch_fully_shard(module, mesh=mesh)
    else:
        for module in (*blocks, model):
            graphfsdp.fully_shard(module, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    shape = (workload.batch_size, workload.model.seq_length)
    tokens = torch.randint(workload.model.vocab_size, shape, device=device)

    def step() -> Tensor:
        loss: Tensor = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if options is not None:
        step.schedule = unit_of(model).schedule  # type: ignore[attr-defined]
    return step


def _profile(step: Callable[[], Tensor]) -> dict[str, float]:
    """Return how long communication kernels ran, and how much of that beside computation."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(NUM_PROFILED):
            step()
        torch.cuda.synchronize()
    comm: list[Span] = []
    compute: list[Span] = []
    for event in profile.events() or ():
        if event.device_type.name != "CUDA":
            continue
        span = (event.time_range.start, event.time_range.end)
        (comm if "nccl" in event.name.lower() else compute).append(span)
    return {"comm_us": length(comm), "hidden_us": covered(comm, compute)}


def _measure(workload: Workload, device: torch.device) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, options in VARIANTS.items():
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        step: Any = _make_step(workload, device, options)
        losses = [step() for _ in range(NUM_WARMUP)]
        numbers = {"loss": float(losses[-1])}
        if options is not None:
            numbers["num_prefetches"] = step.schedule.num_prefetches
        if on_gpu:
            numbers["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
            numbers |= _profile(step)
        found[name] = numbers
        del step
    return found


def _rank(rank: int, num_ranks: int, folder: str, workload: Workload, kind: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
    )
    found = _measure(workload, device)
    if rank == 0:
        (pathlib.Path(folder) / "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def overlap(
    workload: Workload, device: torch.device
) -> list[tuple[str, str, bool, dict[str, Any]]]:
    """Return rows: what was looked at, what was seen, whether that is good, the numbers."""
    num_ranks = min(MAX_RANKS, torch.cuda.device_count()) if device.type == "cuda" else 1
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _rank, (num_ranks, folder, workload, device.type), num_ranks
        )
        found = json.loads((pathlib.Path(folder) / "found").read_text())
    return list(rows_of(found, f"{workload.name}, ZeRO-3 on {num_ranks} ranks"))


def rows_of(
    found: dict[str, dict[str, Any]], what: str
) -> Sequence[tuple[str, str, bool, dict[str, Any]]]:
    """Return the rows of what was measured."""
    base = found["torch fully_shard"]
    plain = found["one after the other"]
    rows = []
    for name, numbers in found.items():
        good = name == "torch fully_shard" or numbers["loss"] == plain["loss"]
        parts = [] if good else [f"loss {numbers['loss']}, not {plain['loss']}"]
        if "num_prefetches" in numbers:
            parts.append(f"{numbers['num_prefetches']:.0f} gathers begun ahead")
        if "peak_bytes" in numbers:
            ratio = numbers["peak_bytes"] / base["peak_bytes"]
            parts.append(f"peak {numbers['peak_bytes'] / 2**20:.0f} MiB, {ratio:.2f} of FSDP2's")
            good = good and ratio <= MEMORY_TOLERANCE
        if numbers.get("comm_us"):
            share = numbers["hidden_us"] / numbers["comm_us"]
            parts.append(f"{share:.0%} of communication beside computation")
        rows.append((f"{what}: {name}", ", ".join(parts) or "loss as expected", good, numbers))
    return rows


__all__ = ["covered", "length", "overlap", "rows_of"]
