"""FusedAdam beside torch's fused AdamW on the parameters of a GPT: memory traffic per second.

On a GPU each is called from Python, and replayed from a CUDA graph, which is what the kernels
alone take.
"""

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.timing import as_record, interleave, window_seconds
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused.settings import bytes_per_param
from graphfsdp.training.gpt import GPT, GPTConfig

LR, BETAS, WEIGHT_DECAY = 1e-4, (0.9, 0.95), 0.1
CHECK_STEPS = 5
TOLERANCE = 1e-5
# What is asked of FusedAdam on a GPU: of a copy's memory traffic, and of torch's speed.
LEAST_SHARE, LEAST_SPEEDUP = 0.9, 1.0
LARGEST_COPY_BYTES = 4 * 2**30


def parameters_of(
    config: GPTConfig, device: torch.device, dtype: torch.dtype
) -> list[nn.Parameter]:
    """Return random parameters in the shapes of a GPT, with random gradients."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in GPT(config).parameters()]
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    parameters = [nn.Parameter(random(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = random(parameter.shape)
    return parameters


def copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Return the traffic of a large copy, read and written bytes together: the ceiling."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    windows = [window_seconds(lambda: target.copy_(source), 5, device) for _ in range(5)]
    return 2 * num_bytes / statistics.median(windows)


def compare_optimizers(
    config: GPTConfig, device: torch.device, num_rounds: int, num_steps: int
) -> Iterator[tuple[str, str, bool, dict[str, object]]]:
    """Yield what was looked at, what was seen, whether it is right, and the numbers."""
    ours = parameters_of(config, device, torch.float32)
    theirs = parameters_of(config, device, torch.float32)
    mixed = parameters_of(config, device, torch.bfloat16)
    fused = FusedAdam(ours, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    fused_mixed = FusedAdam(
        mixed, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, master_weights=True
    )
    contenders: dict[str, Callable[[], object]] = {
        "torch AdamW(fused=True), fp32": torch.optim.AdamW(
            theirs,
            lr=LR,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
            capturable=device.type == "cuda",  # torch's own is capturable on accelerators only
        ).step,
        "FusedAdam, fp32": fused.step,
        "FusedAdam, bf16 with fp32 main weights": fused_mixed.step,
    }
    plain_bytes = bytes_per_param(fused.settings, torch.float32, torch.float32)
    moved = dict.fromkeys(contenders, plain_bytes)
    moved["FusedAdam, bf16 with fp32 main weights"] = bytes_per_param(
        fused_mixed.settings, torch.bfloat16, torch.bfloat16
    )
    for step in contenders.values():
        for _ in range(CHECK_STEPS):
            step()
    gaps = (
        (one.detach() - two.detach()).abs().max() for one, two in zip(ours, theirs, strict=True)
    )
    gap = torch.stack(list(gaps)).max().item()
    yield (
        f"FusedAdam against torch's AdamW, {CHECK_STEPS} steps",
        f"largest difference {gap:.2g}",
        gap <= TOLERANCE,
        {"largest_difference": gap, "tolerance": TOLERANCE},
    )
    num_parameters = sum(parameter.numel() for parameter in ours)
    num_bytes = min(round(plain_bytes * num_parameters), LARGEST_COPY_BYTES)
    ceiling = copy_bytes_per_s(device, num_bytes)
    size = f"{num_parameters / 1e6:.1f}M parameters in {len(ours)} tensors"
    rounds = (num_rounds, num_steps)
    yield from _rows(
        contenders, moved, num_parameters, size, ceiling, device, *rounds, by_graph=False
    )
    if device.type == "cuda":
        graphs = {name: _captured(step, device) for name, step in contenders.items()}
        replays: dict[str, Callable[[], object]] = {n: g.replay for n, g in graphs.items()}
        size += ", from a CUDA graph"
        yield from _rows(
            replays, moved, num_parameters, size, ceiling, device, *rounds, by_graph=True
        )


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


def _rows(
    contenders: dict[str, Callable[[], object]],
    moved: dict[str, float],
    num_parameters: int,
    size: str,
    ceiling: float,
    device: torch.device,
    num_rounds: int,
    num_steps: int,
    *,
    by_graph: bool,
) -> Iterator[tuple[str, str, bool, dict[str, object]]]:
    reference = next(iter(contenders))
    record = as_record(interleave(contenders, num_rounds, num_steps, device), reference)
    for name, numbers in record.items():
        assert isinstance(numbers, dict)
        rate = moved[name] * num_parameters / numbers["step_ms"] * 1e3
        text = f"{numbers['step_ms']:.3f} ms, {moved[name]:g} bytes per parameter, "
        text += f"{rate / 1e9:,.0f} GB/s ({rate / ceiling:.0%} of a copy)"
        good = True
        if numbers["speedup"]:
            speedup = numbers["speedup"]["median"]
            text += f"; {speedup:.3f} times as fast as torch's"
            if device.type == "cuda":
                # Torch has no main weights to keep; Python's share of a step is not the kernels'.
                good = speedup >= LEAST_SPEEDUP or "main weights" in name
                good = good and (rate >= LEAST_SHARE * ceiling or not by_graph)
        data = {
            **numbers,
            "bytes_per_param": moved[name],
            "bytes_per_s": rate,
            "copy_bytes_per_s": ceiling,
        }
        yield f"{name}, {size}", text, good, data
