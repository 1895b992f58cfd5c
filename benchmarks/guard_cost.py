"""What a replay costs beside its program: ``python -m benchmarks.guard_cost`` (CPU, two minutes).

Of each of twelve small architectures, in microseconds: a call of the captured step with another
batch and another learning rate, and all that Python does around the program that it runs; beside it
what torch.compile does around the code of the same model's forward and loss alone, whose compiled
parts return what they have returned before, and compute nothing.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import CPU, measure_zoo
from graphfsdp.bench.contenders import Setting, initial_model, own_contender
from graphfsdp.bench.results import Row
from graphfsdp.bench.workloads import Case, batch_source
from graphfsdp.config import Scope
from graphfsdp.training.ranks import Ranks

NUM_WARM_UPS = 8
NUM_BATCHES = 20
NUM_CALLS = 1_000


def timed(function: Callable[..., Any], us: list[float]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        start = time.perf_counter_ns()
        result = function(*args)
        us.append((time.perf_counter_ns() - start) / 1e3)
        return result

    return call


def without_computing(graph: torch.fx.GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
    """Be a backend of torch.compile whose code returns what the graph has returned once."""
    made = tuple(each.detach() for each in graph(*example))
    return lambda *_: made


def measure(case: Case) -> Row:
    setting = Setting(case, CPU)
    contender = own_contender(setting, Scope.FULL_ITERATION)
    batches = [*map(batch_source(case, CPU, Ranks()), range(NUM_BATCHES))]
    for step in range(NUM_WARM_UPS):
        contender(batches[step], step)
    assert contender.captured is not None
    recording = contender.captured._runner._recordings.latest
    assert recording is not None
    graph: Any = recording.graph
    compiled = torch.compile(initial_model(setting), backend=without_computing)
    for batch in batches:
        compiled(*batch)
    program_us: list[float] = []
    step_us: list[float] = []
    compiled_us: list[float] = []
    graph.replay = timed(graph.replay, program_us)
    ours, theirs = timed(contender, step_us), timed(compiled, compiled_us)
    for index in range(NUM_CALLS):
        batch = batches[index % NUM_BATCHES]
        ours(batch, index)
        theirs(*batch)
    contender.close()
    around_us = [a - b for a, b in zip(step_us, program_us, strict=True)]
    return {
        "step_us": statistics.median(step_us),
        "around_us": statistics.median(around_us),
        "share": statistics.median(a / b for a, b in zip(around_us, step_us, strict=True)),
        "torch_compile_us": statistics.median(compiled_us),
    }


if __name__ == "__main__":
    os.environ["GRAPHFSDP_AUDIT"] = "0"  # each call is to be a replay
    measure_zoo("guard_cost_cpu", measure, "share")
