"""What the one line brings: ``python -m benchmarks.in_place`` (CPU, two minutes).

Of each of twelve small architectures a loop as people write it (AdamW without flags, clipping), and
the same with ``graphfsdp.capture_in_place`` before it. Ten iterations of one, ten of the other, and
so on: the ratio of each pair is of processor time. Losses must be equal, bit for bit.
"""

import statistics
import time

import torch
from torch import Tensor, nn

import graphfsdp
from benchmarks.rows import CPU, tell_of_the_zoo
from graphfsdp.bench.contenders import MAX_GRAD_NORM, Setting, initial_model
from graphfsdp.bench.results import Row
from graphfsdp.bench.workloads import Case, batch_source
from graphfsdp.training.ranks import Ranks

NUM_BATCHES = 32
NUM_FIRST = 80  # iterations in which it is decided what stays
NUM_PAIRS, NUM_TOGETHER = 40, 10


class Loop:
    """One training loop."""

    def __init__(self, case: Case, *, in_place: bool) -> None:
        self._model: nn.Module = initial_model(Setting(case, CPU))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._batches = batch_source(case, CPU, Ranks()).take(0, NUM_BATCHES)
        self.parts = graphfsdp.capture_in_place(self._model, self._optimizer) if in_place else None

    def run(self, num_steps: int) -> list[Tensor]:
        losses = []
        for index in range(num_steps):
            self._optimizer.zero_grad()
            loss = self._model(*self._batches[index % NUM_BATCHES])
            loss.backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
            self._optimizer.step()
            losses.append(loss.detach())
        return losses


def seconds(loop: Loop) -> float:
    began = time.process_time()
    loop.run(NUM_TOGETHER)
    return time.process_time() - began


def measure(case: Case) -> Row:
    plain, in_place = Loop(case, in_place=False), Loop(case, in_place=True)
    losses = []
    for loop in (plain, in_place):
        torch.manual_seed(0)  # of dropout
        losses.append(torch.stack(loop.run(NUM_FIRST)))
    if not torch.equal(*losses):
        raise SystemExit(f"{case.workload.name}: other losses with the line than without it")
    ratios, times = [], []
    for turn in range(NUM_PAIRS):
        order = (plain, in_place) if turn % 2 else (in_place, plain)
        taken = {loop: seconds(loop) for loop in order}
        ratios.append(taken[in_place] / taken[plain])
        times.append(taken[plain] / NUM_TOGETHER * 1e6)
    assert in_place.parts is not None
    part = in_place.parts.report().parts[0]
    in_place.parts.close()
    return {
        "name": case.workload.name,
        "plain_us": statistics.median(times),
        "ratio": statistics.median(ratios),
        "model": part.state,
        "why": part.why,
    }


def main() -> None:
    tell_of_the_zoo(
        "in_place_cpu",
        "A loop with capture_in_place, beside the loop as it is written",
        measure,
        {
            "architecture": "{name}",
            "plain us": "{plain_us:.0f}",
            "ratio": "{ratio:.2f}",
            "its model": "{model}",
        },
        lambda rows: {"mean": statistics.geometric_mean(row["ratio"] for row in rows)},
    )


if __name__ == "__main__":
    main()
