"""The part of the GPU check that looks at ZeRO-3: what overlaps, and peak memory beside FSDP2.

One NCCL rank per GPU where there are two. One GPU cannot hold two ranks of NCCL: it, and a CPU that
rehearses this, are one rank of a group whose others do not exist, and whose data is this rank's: a
gather copies the shard once for each rank, a reduction takes what it has. So the bytes, the
kernels' streams and the memory are those of a sharded training, also inside a CUDA graph; the
trained numbers mean nothing, but are the same in every run.
"""

import datetime
import gc
import json
import pathlib
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.futures import Future

import graphfsdp
from benchmarks.gpu_programs import Row, shape_of
from graphfsdp.base import rank_agreement
from graphfsdp.bench.machine import profiled
from graphfsdp.bench.workloads import find_workload
from graphfsdp.sharding.module import unit_of
from graphfsdp.training.gpt import GPT

# Of each collective's forms c10d calls one; its stub has all.
# mypy: disable-error-code="override"

NAME = "played"
NUM_WARMUP = 4
NUM_PROFILED = 3
NUM_AGAIN = 20
AGAIN = "overlap, captured, again and again"
MAX_RANKS = 2
NUM_PLAYED_RANKS = 8
# Of communication must run beside computation, where it may.
LEAST_HIDDEN = 0.25
# Peaks of graphfsdp may exceed FSDP2's by this factor before the row is marked.
MEMORY_TOLERANCE = 1.05
FSDP2, PLAIN, CAPTURED = "torch fully_shard", "one after the other", "overlap, captured"
VARIANTS: Mapping[str, Mapping[str, bool] | None] = {
    FSDP2: None,
    PLAIN: {"overlap": False},
    "overlap": {},
    "overlap and pool": {"buffer_pool": True},
    CAPTURED: {},
}


def make_deterministic() -> None:
    """Replay can equal eager only as far as eager equals itself."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class PlayedGroup(dist.ProcessGroup):
    """This rank, and others that have what it has."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)  # type: ignore[call-arg]
        self._num_ranks = num_ranks

    def getBackendName(self) -> str:  # noqa: N802 - the name that c10d calls
        return NAME

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def _get_backend(self, device: torch.device) -> "PlayedGroup":
        return self

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for places, tensor in zip(outputs, inputs, strict=True):
            for place in places:
                place.copy_(tensor)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        for place in output.view(-1).chunk(self._num_ranks):
            place.copy_(tensor.view(-1))
        return _done([output])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self._allgather_base(output, tensor, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self._reduce_scatter_base(output, tensor, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        whole = tensor.view(self._num_ranks, -1)
        reduce = torch.sum if _is_sum(opts) else torch.mean
        reduce(whole, 0, out=output.view(-1))  # as many bytes are read as others would send
        return _done([output])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _done(outputs)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors if _is_sum(opts) else ():
            tensor.mul_(self._num_ranks)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _done(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return _done([])


class _SharedStore:
    """The store of a group, in which the other ranks have said what this one says."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values.get(key) or self._values[self._told_as(key)]

    def add(self, key: str, number: int) -> int:
        self._counts[key] = self._counts.get(key, 0) + number
        return self._num_ranks if key.endswith("/count") else self._counts[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values or self._told_as(key) in self._values for key in keys)

    def _told_as(self, key: str) -> str:
        folder, _, rank = key.rpartition("/")
        return f"{folder}/0" if rank.isdigit() else key

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, b"").decode() == expected:
            self._values[key] = desired.encode()
        return self._values.get(key, expected.encode())


def _is_sum(opts: Any) -> bool:
    return opts is None or opts.reduceOp == dist.ReduceOp.SUM


def _done(value: Sequence[Any]) -> dist.Work:
    future: Future[Any] = Future()
    future.set_result(value)
    work: dist.Work = _distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


def _make(store: Any, rank: int, num_ranks: int, timeout: datetime.timedelta) -> PlayedGroup:
    return PlayedGroup(rank, num_ranks)


@contextmanager
def played_ranks(num_ranks: int) -> Iterator[None]:
    """Let the body be rank 0 of a group whose other ranks do not exist; 0 changes nothing."""
    if not num_ranks:
        yield
        return
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
    c10d, shared = dist.distributed_c10d, _SharedStore(num_ranks)
    with (
        # New groups, and whoever agrees on something, would wait until all ranks are there.
        mock.patch.object(c10d, "_store_based_barrier"),
        mock.patch.object(rank_agreement, "_store", return_value=shared),
    ):
        dist.init_process_group(
            NAME, store=_distributed_c10d.HashStore(), rank=0, world_size=num_ranks
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


Span = tuple[float, float]


def covered(spans: Iterable[Span], by: Iterable[Span]) -> float:
    """Return how much of some spans of time lies in others, counting no time twice."""
    others = _merged(by)
    return sum(
        max(0.0, min(end, high) - max(begin, low))
        for begin, end in _merged(spans)
        for low, high in others
    )


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in _merged(spans))


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _again(name: str, device: torch.device) -> dict[str, Any]:
    """Train with overlap many times: what nothing puts in order shows in one of them, if at all."""
    num_runs = NUM_AGAIN if device.type == "cuda" else 2
    losses = [_measure(name, device, CAPTURED, profiles=False)["loss"] for _ in range(num_runs)]
    others = [loss for loss in losses if loss != losses[0]]
    return {"loss": losses[0], "others": others, "num_runs": num_runs}


def _measure(
    name: str, device: torch.device, variant: str, *, profiles: bool = True
) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    torch.manual_seed(0)
    shape, options = shape_of(name), VARIANTS[variant]
    model = GPT(shape).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        if options is None:
            torch_fully_shard(module, mesh=mesh)
        else:
            graphfsdp.fully_shard(module, mesh, **options)  # type: ignore[arg-type]
    size = (find_workload(name).batch_size, shape.seq_length)
    tokens = torch.randint(shape.vocab_size, size, device=device)
    capturable = on_gpu  # torch's own is, on accelerators only
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)
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
        numbers: dict[str, Any] = {"loss": float(losses[-1])}
        if options is not None:
            numbers["num_prefetches"] = unit_of(model).schedule.num_prefetches
        if on_gpu and profiles:
            numbers["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
            numbers |= _profile(step)
    finally:
        if captured is not None:
            captured.close()
    return numbers


def _profile(step: Callable[[], Tensor]) -> dict[str, float]:
    """Communication is what NCCL runs, and what does not run on the stream that runs most."""
    with profiled(torch.device("cuda")) as profile:
        for _ in range(NUM_PROFILED):
            step()
    by_stream: dict[int, list[Span]] = {}
    communication: list[Span] = []
    for event in profile.events() or ():
        if event.device_type.name != "CUDA" or event.is_user_annotation:
            continue
        by_nccl = "nccl" in event.name.lower()
        stream = by_stream.setdefault(event.device_resource_id, [])
        span = (event.time_range.start, event.time_range.end)
        (communication if by_nccl else stream).append(span)
    computation = max(by_stream.values(), key=length, default=[])
    for spans in by_stream.values():
        communication += spans if spans is not computation else []
    hidden_us = covered(communication, computation)
    return {"comm_us": length(communication), "hidden_us": hidden_us}


def _rank(rank: int, num_ranks: int, folder: str, name: str, kind: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    make_deterministic()  # the captured losses are to be the eager ones
    store = f"file://{folder}/store"
    if num_ranks > 1:
        dist.init_process_group("nccl", init_method=store, rank=rank, world_size=num_ranks)
    found: dict[str, dict[str, Any]] = {}
    tests: dict[str, Callable[[], dict[str, Any]]] = {AGAIN: partial(_again, "gpt-tiny", device)}
    tests |= {variant: partial(_measure, name, device, variant) for variant in VARIANTS}
    with played_ranks(NUM_PLAYED_RANKS if num_ranks == 1 else 0):
        for variant, test in tests.items():
            try:
                found[variant] = test()
            except Exception:  # whatever it is: the other variants have something to tell
                found[variant] = {"error": traceback.format_exc()[-2000:]}
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        (pathlib.Path(folder) / "found").write_text(json.dumps(found))


def overlap(name: str, device: torch.device) -> list[Row]:
    num_ranks = min(MAX_RANKS, torch.cuda.device_count()) if device.type == "cuda" else 1
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _rank, (num_ranks, folder, name, device.type), num_ranks
        )
        found = json.loads((pathlib.Path(folder) / "found").read_text())
    ranks = f"{num_ranks} ranks"
    if num_ranks == 1:
        ranks = f"one of {NUM_PLAYED_RANKS} ranks, the others played"
    return overlap_rows(found, f"{name}, ZeRO-3, {ranks}")


def overlap_rows(found: Mapping[str, Mapping[str, Any]], what: str) -> list[Row]:
    base, plain = found[FSDP2], found[PLAIN]
    rows = []
    for name, numbers in found.items():
        if "error" in numbers:
            rows.append(Row(f"{what}: {name}", numbers["error"].splitlines()[-1], False, numbers))
            continue
        if name == AGAIN:
            others = numbers["others"]
            text = f"{numbers['num_runs']} trainings, {len(others)} of other losses {others}"
            rows.append(Row(f"gpt-tiny, ZeRO-3: {name}", text, not others, numbers))
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
        elif "comm_us" in numbers:
            parts.append("the profiler has seen no kernels")
            good = False
        rows.append(Row(f"{what}: {name}", ", ".join(parts) or "loss as expected", good, numbers))
    return rows
