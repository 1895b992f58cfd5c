"""Paired timing: contenders take turns in short windows, so that a slow minute hits them all."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch

from graphfsdp.bench.spread import Spread


def window_seconds(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """Return the seconds of one call, averaged over a window without a host sync in it."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(num_calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / num_calls
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    num_rounds: int,
    num_calls: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Return the seconds per call of each contender in each round.

    A round runs one window of each. The order turns round after each round, so that nobody
    always follows the same neighbour. The garbage collector runs between rounds only.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    gc.disable()
    try:
        for _ in range(num_rounds):
            gc.collect()
            for name in order:
                seconds[name].append(window_seconds(contenders[name], num_calls, device))
            order.reverse()
    finally:
        gc.enable()
    return seconds


def speedups(seconds: Mapping[str, list[float]], reference: str) -> dict[str, Spread]:
    """Return how many times as fast as the reference each other contender is, by round."""
    return {
        name: Spread.of([base / own for base, own in zip(seconds[reference], values, strict=True)])
        for name, values in seconds.items()
        if name != reference
    }


def as_record(seconds: Mapping[str, list[float]], reference: str) -> dict[str, object]:
    """Return medians, ratios and the raw numbers, for a result file."""
    ratios = speedups(seconds, reference)
    return {
        name: {
            "step_ms": statistics.median(values) * 1e3,
            "speedup": asdict(ratios[name]) if name in ratios else None,
            "step_ms_by_round": [value * 1e3 for value in values],
        }
        for name, values in seconds.items()
    }
