"""The inputs of a case: another batch for each step, the same for every contender."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from graphfsdp.bench.contenders import SEED, Setting
from graphfsdp.bench.workloads import ZooConfig
from graphfsdp.data import Batch, TokenBatches, load_corpus


@dataclass(frozen=True)
class BatchSource:
    """Makes batches by number; a batch depends on step and ranks alone."""

    description: str
    make: Callable[[int], Batch]
    device: torch.device

    def take(self, first: int, num_steps: int) -> list[Batch]:
        made = [self.make(step) for step in range(first, first + num_steps)]
        return [tuple(tensor.to(self.device) for tensor in batch) for batch in made]


def batch_source(setting: Setting) -> BatchSource:
    case, ranks, device = setting.case, setting.ranks, setting.device
    model, rows = case.workload.model, case.batch_size
    if isinstance(model, ZooConfig):
        random = model.architecture.batch

        def make_random(step: int) -> Batch:
            number = int(np.random.default_rng((SEED, step, ranks.rank)).integers(2**62))
            return random(torch.Generator().manual_seed(number), rows)

        return BatchSource("random numbers", make_random, device)
    corpus = load_corpus(None)
    together = rows * ranks.size
    batches = TokenBatches(
        corpus,
        seq_length=model.seq_length,
        batch_size=together,
        seed=SEED,
        rank=ranks.rank,
        num_ranks=ranks.size,
    )
    return BatchSource(f"text: {corpus.name}", lambda step: batches.batch(step * together), device)
