"""The part of the GPU check that looks at ZeRO-3: what overlaps, and peak memory beside FSDP2.

One NCCL rank per GPU where there are two; a single GPU is one rank of a group whose others do not
exist (benchmarks/stand_in_group.py), and so is a CPU that rehearses it, where there is nothing to
profile. Not run on a GPU yet.
"""

import gc
import json
import pathlib
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import graphfsdp
from benchmarks.stand_in_group import stand_in_group
from benchmarks.workloads import Workload
from graphfsdp.sharding.module import unit_of
from graphfsdp.training.gpt import GPT

NUM_WARMUP = 4
NUM_PROFILED = 3
MAX_RANKS = 2
NUM_STAND_IN_RANKS = 8
# Of communication must run beside computation, where it may.
LEAST_HIDDEN = 0.25
# Peaks of graphfsdp may exceed FSDP2's by this factor before the row is marked.
MEMORY_TOLERANCE = 1.05
VARIANTS = {
    "torch fully_shard": None,
    "one after the other": {"overlap": False},
    "overlap": {},
    "overlap and pool": {"buffer_pool": True},
    "overlap, captured": {},
}
FSDP2, PLAIN, CAPTURED = "torch fully_shard", "one after the other", "overlap, captured"

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


def _make_step(workload: Workload, device: torch.device, name: str) -> Callable[[], Tensor]:
    """Return a training step of a variant."""
    torch.manual_seed(0)
    model: Any = GPT(workload.model).to(device)
    blocks: list[nn.Module] = list(model.blocks)
    options: Any = VARIANTS[name]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if options is None:
        for module in (*blocks, model):
            torch_fully_shard(module, mesh=mesh)
    else:
        for module in (*blocks, model):
            graphfsdp.fully_shard(module, mesh, **options)
    shape = (workload.batch_size, workload.model.seq_length)
    tokens = torch.randint(workload.model.vocab_size, shape, device=device)
    capturable = device.type == "cuda"  # torch's own is, on accelerators only
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)
    captured = None
    if name == CAPTURED:
        captured = graphfsdp.capture(model, optimizer, warmup_steps=NUM_WARMUP - 1)

    def step() -> Tensor:
        if captured is not None:
            return captured(tokens, tokens)  # type: ignore[no-any-return]
        loss: Tensor = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step.model, step.captured = model, captured  # type: ignore[attr-defined]
    return step


def _profile(step: Callable[[], Tensor]) -> dict[str, float]:
    """Return how long communication ran, and how much of that beside computation.

    Communication is what NCCL runs, and what does not run on the stream that runs most.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(NUM_PROFILED):
            step()
        torch.cuda.synchronize()
    by_stream: dict[int, list[Span]] = {}
    nccl: list[Span] = []
    for event in profile.events() or ():
        if event.device_type.name != "CUDA" or event.is_user_annotation:
            continue
        span = (event.time_range.start, event.time_range.end)
        by_nccl = "nccl" in event.name.lower()
        (nccl if by_nccl else by_stream.setdefault(event.device_resource_id, [])).append(span)
    main = max(by_stream, key=lambda stream: length(by_stream[stream]))
    others = [spans for stream, spans in by_stream.items() if stream != main]
    comm = [*nccl, *(span for spans in others for span in spans)]
    return {
        "comm_us": length(comm),
        "hidden_us": covered(comm, by_stream[main]),
        "num_streams": len(by_stream),
    }


def _measure(workload: Workload, device: torch.device) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in VARIANTS:
        try:
            found[name] = _measure_one(workload, device, name)
        except Exception:  # whatever it is: the other variants have something to tell
            found[name] = {"error": traceback.format_exc()[-2000:]}
    return found


def _measure_one(workload: Workload, device: torch.device, name: str) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    step: Any = _make_step(workload, device, name)
    try:
        losses = [step() for _ in range(NUM_WARMUP + 2)]
        numbers: dict[str, Any] = {"loss": float(losses[-1])}
        if VARIANTS[name] is not None:
            numbers["num_prefetches"] = unit_of(step.model).schedule.num_prefetches
        if on_gpu:
            numbers["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
            numbers |= _profile(step)
    finally:
        if step.captured is not None:
            step.captured.close()
    return numbers


def _rank(rank: int, num_ranks: int, folder: str, workload: Workload, kind: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # the captured losses are to be the eager ones
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if num_ranks == 1:
        with stand_in_group(NUM_STAND_IN_RANKS):
            found = _measure(workload, device)
    else:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
        )
        found = _measure(workload, device)
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        (pathlib.Path(folder) / "found").write_text(json.dumps(found))


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
    ranks = f"{num_ranks} ranks"
    if num_ranks == 1:
        ranks = f"one of {NUM_STAND_IN_RANKS} ranks, the others played"
    return list(rows_of(found, f"{workload.name}, ZeRO-3, {ranks}"))


def rows_of(
    found: dict[str, dict[str, Any]], what: str
) -> Sequence[tuple[str, str, bool, dict[str, Any]]]:
    """Return the rows of what was measured."""
    base, plain = found[FSDP2], found[PLAIN]
    rows = []
    for name, numbers in found.items():
        if "error" in numbers:
            rows.append((f"{what}: {name}", numbers["error"].splitlines()[-1], False, numbers))
            continue
        good = name == FSDP2 or numbers["loss"] == plain.get("loss")
        parts = [] if good else [f"loss {numbers['loss']}, not {plain.get('loss')}"]
        if "num_prefetches" in numbers:
            parts.append(f"{numbers['num_prefetches']:.0f} gathers begun ahead")
        if "peak_bytes" in numbers and "peak_bytes" in base:
            ratio = numbers["peak_bytes"] / base["peak_bytes"]
            parts.append(f"peak {numbers['peak_bytes'] / 2**20:.0f} MiB, {ratio:.2f} of FSDP2's")
            # A graph keeps what it was recorded with, so the captured one is told, not judged.
            good = good and (ratio <= MEMORY_TOLERANCE or name == CAPTURED)
        if numbers.get("comm_us"):
            share = numbers["hidden_us"] / numbers["comm_us"]
            parts.append(f"{share:.0%} of communication beside computation")
            good = good and (share >= LEAST_HIDDEN or name in (FSDP2, PLAIN))
        rows.append((f"{what}: {name}", ", ".join(parts) or "loss as expected", good, numbers))
    return rows
