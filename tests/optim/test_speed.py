"""FusedAdam's step beside torch's AdamW: memory traffic per second.

Times are judged on a GPU alone; elsewhere the same runs with a small model, for its numbers.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cuda_stand_in.library import is_below
from graphfsdp.base.collector import without_collector
from graphfsdp.bench.clock import Window, time_window
from graphfsdp.bench.workloads import find_workload
from graphfsdp.optim import FusedAdam
from graphfsdp.training.gpt import GPT, GPTConfig

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
MAIN_WEIGHTS = "FusedAdam, bf16 with fp32 main weights"
TOLERANCE = 1e-5
# What is asked of FusedAdam on a GPU: of a copy's memory traffic, and of torch's speed.
LEAST_SHARE, LEAST_SPEEDUP = 0.9, 1.0
LARGEST_COPY_BYTES = 4 * 2**30
Steps = Mapping[str, Callable[[], object]]


def is_timed(device: torch.device) -> bool:
    return device.type == "cuda" and not is_below()


def shape_of(name: str, device: torch.device) -> GPTConfig:
    model = find_workload(name if is_timed(device) else "gpt-tiny").model
    assert isinstance(model, GPTConfig)
    return model


def sizes_of(shape: GPTConfig) -> list[torch.Size]:
    with torch.device("meta"):
        return [param.shape for param in GPT(shape).parameters()]


def parameters_of(
    sizes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
) -> list[nn.Parameter]:
    """With gradients; the same in each call."""
    generator = torch.Generator(device).manual_seed(0)

    def random(size: Sequence[int]) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    params = [nn.Parameter(random(size)) for size in sizes]
    for param in params:
        param.grad = random(param.shape)
    return params


def interleave(
    steps: Mapping[str, Callable[[], object]], num_rounds: int, num_steps: int, device: torch.device
) -> dict[str, list[Window]]:
    """The order turns round after each round, so that nobody always follows the same neighbour."""
    windows: dict[str, list[Window]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(num_rounds):
        with without_collector():
            for name in order:
                windows[name].append(time_window([steps[name]] * num_steps, device))
        order.reverse()
    return windows


def bytes_per_param(
    settings: Mapping[str, Any], param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> float:
    """Return the bytes that one step reads and writes for each element of a parameter.

    State tensors are read and written, gradients read. A model weight is read and written, or only
    written where there is a float32 main weight. Scales are counted as for rows of a multiple of
    256 elements. What clipping and the skip of non-finite gradients read once more is not counted.
    """
    param = torch.nn.Parameter(torch.zeros((2, 256), dtype=param_dtype))
    optimizer = FusedAdam([param], use_decoupled_grad=True, **settings)
    param.decoupled_grad = torch.ones_like(param, dtype=grad_dtype)  # type: ignore[attr-defined]
    optimizer.step()
    state = optimizer.state[param]
    written = param.nbytes + sum(value.nbytes for key, value in state.items() if key != "step")
    read = written + param.numel() * grad_dtype.itemsize
    if state.get("master_param", param).dtype != param_dtype and not settings.get(
        "store_param_remainders"
    ):
        read -= param.nbytes
    moved: float = (read + written) / param.numel()
    return moved


def test_the_document_shows_the_bytes_of_a_step() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fused_adam.md").read_text(encoding="utf-8")
    fp32, bf16 = torch.float32, torch.bfloat16
    main, half = {"master_weights": True}, {"master_weights": True, "store_param_remainders": True}
    narrow = {"exp_avg_dtype": bf16, "exp_avg_sq_dtype": bf16}
    cases: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype]] = {
        "fp32": ({}, fp32, fp32),
        "fp32, bf16 moments": (narrow, fp32, fp32),
        "bf16, fp32 main weight": (main, bf16, bf16),
        "bf16, fp32 main weight and gradient": (main, bf16, fp32),
        "bf16, fp32 main weight, bf16 moments": (main | narrow, bf16, bf16),
        "bf16, int16 remainder": (half, bf16, bf16),
        "bf16, int16 remainder, bf16 moments": (half | narrow, bf16, bf16),
        "all bf16": (narrow, bf16, bf16),
    }
    for name, case in cases.items():
        assert f"| {name} | {bytes_per_param(*case):.4g} | " in page


def largest_gap(left: Any, right: Any) -> float:
    pairs = zip(left, right, strict=True)
    return torch.stack([(a.detach() - b.detach()).abs().max() for a, b in pairs]).max().item()


def copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Return the traffic of a large copy, read and written bytes together: the ceiling."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    times = [time_window([lambda: target.copy_(source)] * 5, device).mean_ms for _ in range(6)]
    return 2e3 * num_bytes / statistics.median(times[1:])


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def judge(
    windows: Mapping[str, Sequence[Window]],
    moved: Mapping[str, float],  # bytes per second of each, at one step per millisecond
    ceiling: float,
    *,
    by_graph: bool,
) -> tuple[str, list[str]]:
    """Return what was found and what is too slow, beside the first of the steps."""
    reference, *_ = windows.values()
    told, slow = [], []
    for name, own in windows.items():
        ms = statistics.median(window.mean_ms for window in own)
        share = moved[name] / ms / ceiling
        pairs = zip(reference, own, strict=True)
        speedup = statistics.median(base.mean_ms / mine.mean_ms for base, mine in pairs)
        told.append(
            f"{name}: {ms:.3f} ms, {moved[name] / ms / 1e9:,.0f} GB/s ({share:.0%} of a copy), "
            f"{speedup:.3f} times as fast as torch's"
        )
        if own is not reference:
            # Torch has no main weights to keep; Python's share of a step is not the kernels'.
            is_behind = speedup < LEAST_SPEEDUP and name != MAIN_WEIGHTS
            slow += [name] if is_behind or (by_graph and share < LEAST_SHARE) else []
    return "; ".join(told), slow


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("size", ["124M", "1B"])
def test_a_step_is_as_fast_as_memory(
    size: str, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    shape = shape_of("gpt2-124m" if size == "124M" else "gpt2-355m", device)
    if size == "1B":
        if not is_timed(device):
            pytest.skip("needs a GPU: the sizes differ in nothing but time")
        shape = replace(shape, hidden_size=1792)
    sizes = sizes_of(shape)
    ours, theirs = (parameters_of(sizes, device, torch.float32) for _ in range(2))
    mixed = parameters_of(sizes, device, torch.bfloat16)
    capturable = device.type == "cuda"  # torch's own is capturable on accelerators only
    steps: Steps = {
        "torch AdamW(fused=True), fp32": torch.optim.AdamW(
            theirs, fused=True, capturable=capturable, **SETTINGS
        ).step,
        "FusedAdam, fp32": FusedAdam(ours, **SETTINGS).step,
        MAIN_WEIGHTS: FusedAdam(mixed, master_weights=True, **SETTINGS).step,
    }
    for step in steps.values():
        for _ in range(5):
            step()
    assert largest_gap(ours, theirs) <= TOLERANCE
    if not is_timed(device):
        return
    num_params = sum(param.numel() for param in ours)
    plain = bytes_per_param({}, torch.float32, torch.float32)
    with_main = bytes_per_param({"master_weights": True}, torch.bfloat16, torch.bfloat16)
    each = zip(steps, (plain, plain, with_main), strict=True)
    moved = {name: per_param * num_params * 1e3 for name, per_param in each}
    ceiling = copy_bytes_per_s(device, min(round(plain * num_params), LARGEST_COPY_BYTES))
    rounds = (20, 10) if size == "124M" else (8, 5)
    replays = {name: captured(step, device) for name, step in steps.items()}
    for way, these in (("from Python", steps), ("from a CUDA graph", replays)):
        by_graph = these is replays
        windows = interleave(these, *rounds, device)
        text, slow = judge(windows, moved, ceiling, by_graph=by_graph)
        record_property(f"{num_params / 1e6:.1f}M parameters, {way}", text)
        assert not slow
