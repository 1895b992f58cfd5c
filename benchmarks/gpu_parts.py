"""The parts of the GPU check, as programs of which each runs in a process of its own.

``python -m benchmarks.gpu_parts PART PROGRAM DEVICE [rehearse]`` runs one and prints its rows as
JSON. A CUDA error makes every later call in a process fail, so none shares its process.
``rehearse`` takes the smallest model; a CPU then runs all of them, but what only a GPU has.
"""

import functools
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

import graphfsdp
from benchmarks.adam_table import bytes_per_param
from benchmarks.gpu_programs import (
    NUM_SEQUENCES,
    PROGRAMS,
    Row,
    compare,
    compiled,
    gpt,
    narrowed,
    shape_of,
)
from benchmarks.gpu_sharding import make_deterministic, overlap
from graphfsdp.bench.clock import interleave, time_window
from graphfsdp.optim import CPUOffload, FusedAdam
from graphfsdp.training.gpt import GPT, GPTConfig

LR = 1e-3
TINY = shape_of("gpt-tiny")
Part = Callable[[torch.device], Iterable[Row]]


def of_gpu(name: str, part: Part) -> Part:
    """Return a part that a CPU only names."""

    def run(device: torch.device) -> Iterable[Row]:
        return [Row(name, "only on a GPU")] if device.type == "cpu" else part(device)

    return run


def synchronize(tokens: Tensor) -> None:
    torch.cuda.current_stream().synchronize()  # torch would refuse a copy by itself


def read_a_number(tokens: Tensor) -> None:
    tokens.sum().item()


def fail(tokens: Tensor) -> None:
    raise KeyError("of the loss function")


# How a capture is broken, and the error that is to come out: the driver's number, or a name.
BREAKS: Mapping[str, tuple[Callable[[Tensor], None], str]] = {
    "the host waits": (synchronize, "900"),
    "a number is read": (read_a_number, "900"),
    "the loss function fails": (fail, "KeyError"),
}


def broken(
    name: str, break_it: Callable[[Tensor], None], expected: str, device: torch.device
) -> Iterator[Row]:
    """Let a capture break, and go on: draw, empty the cache, capture again."""
    breaks = True

    def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        if breaks and torch.cuda.is_current_stream_capturing():
            break_it(tokens)
        return loss

    torch.manual_seed(0)
    model = GPT(TINY).to(device)
    tokens = torch.randint(256, (NUM_SEQUENCES, TINY.seq_length), device=device)
    optimizer = FusedAdam(model.parameters(), lr=LR)
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn) as step:
        said = "CUDA has captured it"
        for _ in range(4):
            try:
                step(tokens, tokens)
            except graphfsdp.CaptureError as error:
                said = f"{error.cuda_error}"
            except KeyError as error:
                said = type(error).__name__
        breaks = False
        torch.rand(3, device=device)
        torch.cuda.empty_cache()
        for _ in range(6):
            step(tokens, tokens)
        phase = step.phase.value
    yield Row(name, f"{said}, then {phase}", said == expected and phase == "replay")


# --- FusedAdam beside torch's: memory traffic per second, and offloaded state ---

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
TOLERANCE = 1e-5
# What is asked of FusedAdam on a GPU: of a copy's memory traffic, and of torch's speed.
LEAST_SHARE, LEAST_SPEEDUP = 0.9, 1.0
LARGEST_COPY_BYTES = 4 * 2**30


def sizes_of(shape: GPTConfig) -> list[torch.Size]:
    with torch.device("meta"):
        return [param.shape for param in GPT(shape).parameters()]


def parameters_of(
    sizes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
) -> list[nn.Parameter]:
    """The same in each call."""
    generator = torch.Generator(device).manual_seed(0)

    def random(size: Sequence[int]) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    params = [nn.Parameter(random(size)) for size in sizes]
    for param in params:
        param.grad = random(param.shape)
    return params


def copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Return the traffic of a large copy, read and written bytes together: the ceiling."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    times = [time_window([lambda: target.copy_(source)] * 5, device).mean_ms for _ in range(6)]
    return 2e3 * num_bytes / statistics.median(times[1:])


def optimizers(shape: GPTConfig, rounds: tuple[int, int], device: torch.device) -> Iterator[Row]:
    """Compare with torch's AdamW, called from Python, and on a GPU replayed from a CUDA graph."""
    sizes = sizes_of(shape)
    ours, theirs = (parameters_of(sizes, device, torch.float32) for _ in range(2))
    mixed = parameters_of(sizes, device, torch.bfloat16)
    settings: dict[str, Any] = {"lr": 1e-4, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
    fused = FusedAdam(ours, **settings)
    fused_mixed = FusedAdam(mixed, master_weights=True, **settings)
    capturable = device.type == "cuda"  # torch's own is capturable on accelerators only
    adamw = torch.optim.AdamW(theirs, fused=True, capturable=capturable, **settings)
    steps: dict[str, Callable[[], object]] = {
        "torch AdamW(fused=True), fp32": adamw.step,
        "FusedAdam, fp32": fused.step,
        "FusedAdam, bf16 with fp32 main weights": fused_mixed.step,
    }
    plain_bytes = bytes_per_param({}, torch.float32, torch.float32)
    mixed_bytes = bytes_per_param({"master_weights": True}, torch.bfloat16, torch.bfloat16)
    moved = dict(zip(steps, (plain_bytes, plain_bytes, mixed_bytes), strict=True))
    for step in steps.values():
        for _ in range(5):
            step()
    pairs = zip(ours, theirs, strict=True)
    gaps = [(one.detach() - two.detach()).abs().max() for one, two in pairs]
    gap = torch.stack(gaps).max().item()
    what = "FusedAdam against torch's AdamW, 5 steps"
    yield Row(what, f"largest difference {gap:.2g}", gap <= TOLERANCE)
    num_params = sum(param.numel() for param in ours)
    ceiling = copy_bytes_per_s(device, min(round(plain_bytes * num_params), LARGEST_COPY_BYTES))
    size = f"{num_params / 1e6:.1f}M parameters in {len(ours)} tensors"
    judged = functools.partial(speed_rows, moved, num_params, ceiling, device, rounds)
    yield from judged(steps, size)
    if device.type == "cuda":
        replays = {name: _captured(step, device).replay for name, step in steps.items()}
        yield from judged(replays, f"{size}, from a CUDA graph", by_graph=True)


def _captured(step: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def speed_rows(
    moved: Mapping[str, float],
    num_params: int,
    ceiling: float,
    device: torch.device,
    rounds: tuple[int, int],
    steps: Mapping[str, Callable[[], object]],
    size: str,
    *,
    by_graph: bool = False,
) -> Iterator[Row]:
    """Judge times beside those of the first contender; ``moved`` is bytes per parameter."""
    reference = next(iter(steps))
    windows = interleave(steps, *rounds, device)
    for name, own in windows.items():
        ms = statistics.median(window.mean_ms for window in own)
        rate = moved[name] * num_params / ms * 1e3
        text = f"{ms:.3f} ms, {moved[name]:g} bytes per parameter, {rate / 1e9:,.0f} GB/s "
        text += f"({rate / ceiling:.0%} of a copy)"
        good = True
        if name != reference:
            pairs = zip(windows[reference], own, strict=True)
            speedup = statistics.median(base.mean_ms / mine.mean_ms for base, mine in pairs)
            text += f"; {speedup:.3f} times as fast as torch's"
            if device.type == "cuda":
                # Torch has no main weights to keep; Python's share of a step is not the kernels'.
                good = speedup >= LEAST_SPEEDUP or "main weights" in name
                good = good and (rate >= LEAST_SHARE * ceiling or not by_graph)
        yield Row(f"{name}, {size}", text, good, {"ms": ms, "copy_bytes_per_s": ceiling})


def offload(name: str, device: torch.device) -> Iterator[Row]:
    pinned = {"pin_cpu_params": True, "pin_cpu_grads": True}
    kinds: dict[str, dict[str, bool] | None] = {
        "on the device": None,
        "offloaded": {"overlap_cpu_optimizer_d2h_h2d": False},
        "offloaded, pinned": {"overlap_cpu_optimizer_d2h_h2d": False, **pinned},
        "offloaded, pinned, overlap": pinned,
    }
    sets: dict[str, list[nn.Parameter]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for kind, options in kinds.items():
        sets[kind] = parameters_of(sizes_of(shape_of(name)), device, torch.float32)
        optimizer: Any = FusedAdam(sets[kind], lr=LR)
        if options is not None:
            optimizer = CPUOffload(optimizer, **options)
        steps[kind] = optimizer.step
        optimizer.step()  # makes the state, and pins memory
    windows = interleave(steps, 3, 2, device)
    times = {kind: statistics.median(one.mean_ms for one in own) for kind, own in windows.items()}
    for kind, ms in times.items():
        gaps = [(a - b).abs().max() for a, b in zip(sets["on the device"], sets[kind], strict=True)]
        gap, speedup = torch.stack(gaps).max().item(), times["offloaded"] / ms
        text = f"{ms:.1f} ms, {speedup:.2f} times as fast as offloaded, "
        # Seven steps of 1e-3 each; a GPU rounds other than a CPU.
        good = gap <= TOLERANCE
        if kind.endswith("overlap") and device.type == "cuda":
            good = good and speedup >= 1.0
        text += f"largest difference {gap:.2g}"
        yield Row(f"{name} optimizer step, {kind}", text, good, {"ms": ms})


def parts(*, rehearses: bool) -> Mapping[str, Mapping[str, Part]]:
    """Return the programs of each part by name; ``rehearses``: on the smallest model."""
    small = ("gpt-tiny",) if rehearses else ("gpt-tiny", "llama-tiny", "gpt-11m")
    large = "gpt-tiny" if rehearses else "gpt2-124m"
    largest = TINY if rehearses else replace(shape_of("gpt2-355m"), hidden_size=1792)
    often, seldom = ((2, 1), (2, 1)) if rehearses else ((20, 10), (8, 5))
    programs = {
        "smoke": PROGRAMS,
        "parity-fp32": {name: gpt(name) for name in small},
        "parity-bf16": {name: gpt(name, narrowed, master_weights=True) for name in small},
    }
    inside = "torch.compile inside the graph"
    compiles = of_gpu(inside, functools.partial(compare, inside, gpt("gpt-tiny", compiled)))
    return {
        part: {name: functools.partial(compare, name, each) for name, each in members.items()}
        for part, members in programs.items()
    } | {
        "broken": {
            name: of_gpu(name, functools.partial(broken, name, *how))
            for name, how in BREAKS.items()
        },
        "compile": {inside: compiles},
        "optimizer": {large: functools.partial(optimizers, shape_of(large), often)},
        "optimizer-1b": {"1b": functools.partial(optimizers, largest, seldom)},
        "offload": {large: functools.partial(offload, large)},
        "overlap": {large: functools.partial(overlap, large)},
    }


def main() -> None:
    """Run one program; the last line of the output is the result."""
    part, name, device = sys.argv[1], sys.argv[2], torch.device(sys.argv[3])
    if device.type == "cpu":
        torch.set_num_threads(1)
    if not part.startswith(("optimizer", "offload")):
        # Read at the first matrix product; child processes inherit it.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        make_deterministic()
    rows: list[dict[str, object]] = []
    error = None
    try:
        for row in parts(rehearses="rehearse" in sys.argv[4:])[part][name](device):
            rows.append(asdict(row))
            # The last line that was printed counts, also if the process is killed meanwhile.
            print(json.dumps({"rows": rows, "error": "it did not end"}), flush=True)
    except Exception:
        error = traceback.format_exc()
    print(json.dumps({"rows": rows, "error": error}))


if __name__ == "__main__":
    main()
