"""FusedAdam beside torch's fused AdamW on GPT-2-124M's tensors, on the CPU, in paired rounds.

Plain float32, and bfloat16 weights with float32 main weights beside the usual loop: a list of
float32 copies that AdamW steps on, gradients cast to float32, weights cast back. The time is the
processor's, all threads together, so that other processes count only by what they do to caches.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from benchmarks.adam_table import gpt2_124m
from benchmarks.environment import describe, output_directory
from benchmarks.layout_table import Shapes
from benchmarks.timing import as_record
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused.settings import bytes_per_param

_DEVICE = torch.device("cpu")
_LR, _BETAS, _WEIGHT_DECAY = 1e-4, (0.9, 0.95), 0.1


def make_parameters(shapes: Shapes, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return random parameters with random gradients, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        parameters.append(parameter)
    return parameters


def torch_adamw(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(
        parameters, lr=_LR, betas=_BETAS, weight_decay=_WEIGHT_DECAY, fused=True
    )


def master_copy_loop(parameters: list[nn.Parameter]) -> Callable[[], object]:
    """Return the usual step of bfloat16 parameters with float32 copies."""
    copies = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = torch_adamw(copies)

    def step() -> None:
        with torch.no_grad():
            for copy, parameter in zip(copies, parameters, strict=True):
                assert parameter.grad is not None, "make_parameters sets it"
                copy.grad = parameter.grad.float()
            optimizer.step()
            for copy, parameter in zip(copies, parameters, strict=True):
                parameter.copy_(copy)

    return step


def time_placement(
    shapes: Shapes, dtype: torch.dtype, num_rounds: int, *, ours_first: bool
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each step, and our bytes per parameter, for fresh memory.

    Args:
        shapes: Of the parameters.
        dtype: Of the parameters and gradients.
        num_rounds: Steps of each contender.
        ours_first: Whose tensors are made first.
    """
    first, second = make_parameters(shapes, dtype), make_parameters(shapes, dtype)
    mine, others = (first, second) if ours_first else (second, first)
    narrow = dtype == torch.bfloat16
    ours = FusedAdam(mine, lr=_LR, betas=_BETAS, weight_decay=_WEIGHT_DECAY, master_weights=narrow)
    theirs = master_copy_loop(others) if narrow else torch_adamw(others).step
    contenders: dict[str, Callable[[], object]] = {"torch": theirs, "FusedAdam": ours.step}
    for step in contenders.values():
        step()
    seconds = processor_seconds(contenders, num_rounds)
    return seconds, bytes_per_param(ours.settings, dtype, dtype)


def processor_seconds(
    contenders: Mapping[str, Callable[[], object]], num_rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of processor time of each contender in each round, in turning order."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(num_rounds):
        for name in order:
            began = time.process_time()
            contenders[name]()
            seconds[name].append(time.process_time() - began)
        order.reverse()
    return seconds


def measure_dtype(
    shapes: Shapes, dtype: torch.dtype, num_rounds: int, num_placements: int
) -> dict[str, object]:
    """Return the record of one comparison over several placements in memory.

    Where the pages lie changes the time of one and the same optimizer by up to a tenth, so both
    are made anew several times, in alternating order.
    """
    seconds: dict[str, list[float]] = {"torch": [], "FusedAdam": []}
    bytes_moved = 0.0
    for placement in range(num_placements):
        found, bytes_moved = time_placement(
            shapes, dtype, num_rounds, ours_first=placement % 2 == 0
        )
        for name, values in found.items():
            seconds[name] += values
    return {"bytes_per_param": bytes_moved, **as_record(seconds, "torch")}


def measure(shapes: Shapes, num_rounds: int, num_placements: int) -> dict[str, object]:
    """Return the record of both comparisons."""
    found: dict[str, object] = {"environment": describe(_DEVICE)}
    found["num_threads"] = torch.get_num_threads()
    found["num_rounds"], found["num_placements"] = num_rounds, num_placements
    for name, dtype in (("fp32", torch.float32), ("bf16, fp32 main weights", torch.bfloat16)):
        found[name] = measure_dtype(shapes, dtype, num_rounds, num_placements)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write ``adam_cpu.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each in a placement")
    parser.add_argument("--placements", type=int, default=6, help="fresh sets of tensors")
    options = parser.parse_args(arguments)
    shapes = gpt2_124m()
    found = measure(shapes, options.rounds, options.placements)
    path = output_directory() / "adam_cpu.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    num_elements = sum(torch.Size(shape).numel() for shape in shapes)
    for name, record in found.items():
        if not isinstance(record, dict) or "FusedAdam" not in record:
            continue
        ours = record["FusedAdam"]
        rate = record["bytes_per_param"] * num_elements / ours["step_ms"] / 1e6
        print(
            f"{name}: {ours['step_ms']:.0f} ms, {record['bytes_per_param']} bytes per parameter, "
            f"{rate:.1f} GB/s; {ours['speedup']['median']:.3f} times as fast as torch's "
            f"({ours['speedup']['minimum']:.3f} to {ours['speedup']['maximum']:.3f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
