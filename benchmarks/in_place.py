"""What the one line brings: ``python -m benchmarks.in_place`` (CPU, two minutes).

Of each of twelve small architectures a loop as people write it (AdamW without flags, clipping), and
the same with ``graphfsdp.capture_in_place`` before it. Ten iterations of one, ten of the other, and
so on: the ratio of each pair is of processor time. Losses must be equal, bit for bit.
"""

import functools
import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

import graphfsdp
from benchmarks.rows import CPU, measure_zoo
from graphfsdp.bench.contenders import MAX_GRAD_NORM, Setting, initial_model
from graphfsdp.bench.measure import in_turns, time_window
from graphfsdp.bench.results import Row
from graphfsdp.bench.workloads import Case, batch_source
from graphfsdp.training.ranks import Ranks

NUM_BATCHES = 32
NUM_FIRST = 80  # iterations in which it is decided what stays
NUM_PAIRS, NUM_TOGETHER = 40, 10


def loop_of(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> Callable[[], Tensor]:
    batches = itertools.cycle([*map(batch_source(case, CPU, Ranks()), range(NUM_BATCHES))])

    def iterate() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(*next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return loss.detach()

    return iterate


def measure(case: Case) -> Row:
    models = [initial_model(Setting(case, CPU)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    parts = graphfsdp.capture_in_place(models[1], optimizers[1])
    plain, in_place = map(loop_of, models, optimizers, (case, case))
    loops = {"plain": plain, "in_place": in_place}
    losses = []
    for iterate in loops.values():
        torch.manual_seed(0)  # of dropout
        losses.append(torch.stack([iterate() for _ in range(NUM_FIRST)]))
    if not torch.equal(*losses):
        raise SystemExit(f"{case.workload.name}: other losses with the line than without it")
    windows = in_turns(
        {
            name: functools.partial(time_window, [iterate] * NUM_TOGETHER, CPU)
            for name, iterate in loops.items()
        },
        range(NUM_PAIRS),
    )
    pairs = zip(windows["in_place"], windows["plain"], strict=True)
    part = parts.report().parts[0]
    parts.close()
    return {
        "plain_us": 1e3 * statistics.median(window.cpu_ms for window in windows["plain"]),
        "ratio": statistics.median(mine.cpu_ms / theirs.cpu_ms for mine, theirs in pairs),
        "model": part.state,
        "why": part.why,
    }


if __name__ == "__main__":
    measure_zoo("in_place_cpu", measure, "ratio")
