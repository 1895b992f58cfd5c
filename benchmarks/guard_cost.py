"""What a replay costs beside its program: ``python -m benchmarks.guard_cost`` (CPU, two minutes).

Of each of twelve small architectures: a call of the captured step with another batch and another
learning rate, and how much of it is the program that it runs. The rest is all that Python does
around a replay: it finds the graph of the batch, copies it in, asks the guards, hands numbers to
the optimizer and results to the caller. Beside it stands what torch.compile does around the code of
the same model's forward and loss alone, without backward and optimizer: a call whose compiled parts
return what they have returned before, and compute nothing.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import CPU, tell_of_the_zoo
from graphfsdp.bench.contenders import Setting, initial_model, own_contender
from graphfsdp.bench.results import Row
from graphfsdp.bench.workloads import Case, batch_source
from graphfsdp.config import Scope
from graphfsdp.training.ranks import Ranks

NUM_WARM_UPS = 8
NUM_BATCHES = 20
NUM_CALLS = 1_000


class Stopwatch:
    """Calls a function, and keeps how long it took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.us: list[float] = []

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter_ns()
        result = self._function(*args)
        self.us.append((time.perf_counter_ns() - start) / 1e3)
        return result


def without_computing(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
    """Be a backend of torch.compile whose code returns what the graph has returned once."""
    made: list[Any] = []

    def run(*args: Any) -> Any:
        if not made:
            made.append(tuple(each.detach() for each in graph(*args)))
        return made[0]

    return run


def measure(case: Case) -> Row:
    setting = Setting(case, CPU)
    contender = own_contender(setting, Scope.FULL_ITERATION)
    batches = batch_source(case, CPU, Ranks()).take(0, NUM_BATCHES)
    for step in range(NUM_WARM_UPS):
        contender(batches[step], step)
    assert contender.captured is not None
    recording = contender.captured._runner._recordings.latest
    assert recording is not None
    graph: Any = recording.graph
    graph.replay = program = Stopwatch(graph.replay)
    whole = Stopwatch(contender)
    compiled = torch.compile(initial_model(setting), backend=without_computing)
    for batch in batches:
        compiled(*batch)
    theirs = Stopwatch(compiled)
    for index in range(NUM_CALLS):
        batch = batches[index % NUM_BATCHES]
        whole(batch, index)
        theirs(*batch)
    around = [a - b for a, b in zip(whole.us, program.us, strict=True)]
    contender.close()
    return {
        "name": case.workload.name,
        "num_params": len(contender.optimizer.param_groups[0]["params"]),
        "step_us": statistics.median(whole.us),
        "around_us": statistics.median(around),
        "share": statistics.median(a / b for a, b in zip(around, whole.us, strict=True)),
        "torch_compile_us": statistics.median(theirs.us),
    }


def main() -> None:
    os.environ["GRAPHFSDP_AUDIT"] = "0"  # each call is to be a replay
    tell_of_the_zoo(
        "guard_cost_cpu",
        "Around a replay, and around torch.compile's code of the forward alone",
        measure,
        {
            "architecture": "{name}",
            "parameters": "{num_params}",
            "step us": "{step_us:.0f}",
            "around us": "{around_us:.0f}",
            "share": "{share:.1%}",
            "torch.compile us": "{torch_compile_us:.0f}",
        },
    )


if __name__ == "__main__":
    main()
