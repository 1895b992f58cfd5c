"""FusedAdam's step beside torch's fused AdamW: ``python -m benchmarks.optimizer_step``.

An optimizer is as fast as memory: what a step reads and writes, over the time that it takes, is
compared with a large copy. All take turns in short windows, on a GPU from a CUDA graph. Exit code 1
says that ours is slower than torch's, or moves less than nine tenths of what a
copy does, on a GPU; elsewhere nothing is judged.
"""

import functools
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rows import parser_for, tell
from graphfsdp.bench.measure import in_turns, time_window
from graphfsdp.bench.results import Row
from graphfsdp.bench.workloads import find_workload
from graphfsdp.optim import FusedAdam

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
TORCH, OURS = "torch AdamW(fused=True), fp32", "FusedAdam, fp32"
MAIN_WEIGHTS = "FusedAdam, bf16 with fp32 main weights"
# What is asked of FusedAdam on a GPU: of a copy's memory traffic, and of torch's speed.
LEAST_SHARE, LEAST_SPEEDUP = 0.9, 1.0
LARGEST_COPY_BYTES = 4 * 2**30
Step = Callable[[], object]


def parameters_of(model: str, device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters of a workload's sizes with gradients, the same in each call."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        sizes = [param.shape for param in find_workload(model).make().parameters()]

    def random(size: torch.Size) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    params = [nn.Parameter(random(size)) for size in sizes]
    for param in params:
        param.grad = random(param.shape)
    return params


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
    if state.get("master_param", param).dtype != param_dtype:
        read -= param.nbytes
    moved: float = (read + written) / param.numel()
    return moved


def captured(step: Step) -> Step:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Return the traffic of a large copy, read and written bytes together: the ceiling."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    times = [time_window([lambda: target.copy_(source)] * 5, device).mean_ms for _ in range(6)]
    return 2e3 * num_bytes / statistics.median(times[1:])


def measure(model: str, device: torch.device) -> list[Row]:
    """Return a row for each optimizer."""
    # torch's own is capturable on accelerators only.
    options = {"fused": True, "capturable": device.type == "cuda", **SETTINGS}
    theirs, ours = (parameters_of(model, device, torch.float32) for _ in range(2))
    mixed = parameters_of(model, device, torch.bfloat16)
    steps: dict[str, Step] = {
        TORCH: torch.optim.AdamW(theirs, **options).step,
        OURS: FusedAdam(ours, **SETTINGS).step,
        MAIN_WEIGHTS: FusedAdam(mixed, master_weights=True, **SETTINGS).step,
    }
    for step in steps.values():
        for _ in range(5):
            step()
    num_params = sum(param.numel() for param in ours)
    plain = num_params * bytes_per_param({}, torch.float32, torch.float32)
    with_main = bytes_per_param({"master_weights": True}, torch.bfloat16, torch.bfloat16)
    moved = {TORCH: plain, OURS: plain, MAIN_WEIGHTS: num_params * with_main}
    ceiling = copy_bytes_per_s(device, min(round(plain), LARGEST_COPY_BYTES))
    if device.type == "cuda":
        steps = {name: captured(step) for name, step in steps.items()}
    judges = device.type == "cuda" and "CUDA_STAND_IN" not in os.environ
    # Rounds and steps of each; what is judged nowhere takes few.
    num_rounds, num_steps = (3, 2) if not judges else (8, 5) if num_params > 5e8 else (20, 10)
    windows = in_turns(
        {
            name: functools.partial(time_window, [step] * num_steps, device)
            for name, step in steps.items()
        },
        range(num_rounds),
    )
    rows = []
    for name, own in windows.items():
        ms = statistics.median(window.mean_ms for window in own)
        share = moved[name] * 1e3 / ms / ceiling
        pairs = zip(windows[TORCH], own, strict=True)
        speedup = statistics.median(base.mean_ms / mine.mean_ms for base, mine in pairs)
        # torch has no main weights to keep.
        is_slow = share < LEAST_SHARE or (speedup < LEAST_SPEEDUP and name != MAIN_WEIGHTS)
        rows.append(
            {
                "what": f"{name}, {num_params / 1e6:.1f}M parameters",
                "result": f"{ms:.3f} ms, {moved[name] / ms / 1e6:,.0f} GB/s ({share:.0%} of a "
                f"copy), {speedup:.3f} times as fast as torch's",
                "ok": not judges or name == TORCH or not is_slow,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_for("optimizer_step", __doc__)
    parser.add_argument(
        "--model", nargs="+", default=["gpt2-124m"], help="workloads of graphfsdp bench"
    )
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    return tell([row for name in options.model for row in measure(name, device)], options.out)


if __name__ == "__main__":
    sys.exit(main())
