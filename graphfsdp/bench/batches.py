"""The inputs of a case: another batch for each step, the same for every contender."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphfsdp.bench.workloads import Case, ZooConfig
from graphfsdp.data import Corpus, TokenBatches, load_corpus
from graphfsdp.training.ranks import Ranks

Batch = tuple[Tensor, ...]
_NUM_RANDOM_TOKENS = 1 << 20


@dataclass(frozen=True)
class BatchSource:
    """Makes batches by number; a batch depends on seed, step and ranks alone."""

    description: str
    make: Callable[[int], Batch]
    device: torch.device

    def take(self, first: int, num_steps: int) -> list[Batch]:
        made = [self.make(step) for step in range(first, first + num_steps)]
        return [tuple(tensor.to(self.device) for tensor in batch) for batch in made]


def batch_source(
    case: Case,
    device: torch.device,
    *,
    data: str | None = None,
    random_tokens: bool = False,
    seed: int = 0,
    ranks: Ranks,
) -> tuple[Case, BatchSource]:
    """Also returns the case with a vocabulary that holds its tokens.

    ``data`` is what ``graphfsdp train --data`` takes; None is Python's standard library.
    """
    model, rows = case.workload.model, case.batch_size
    if isinstance(model, ZooConfig):
        random = model.architecture.batch

        def make_random(step: int) -> Batch:
            number = int(np.random.default_rng((seed, step, ranks.rank)).integers(2**62))
            return random(torch.Generator().manual_seed(number), rows)

        return case, BatchSource("random numbers", make_random, device)
    corpus = _random(model.vocab_size, seed) if random_tokens else load_corpus(data)
    case = Case(case.workload.with_vocabulary(corpus.vocab_size), case.dtype, rows)
    together = rows * ranks.size
    batches = TokenBatches(
        corpus,
        seq_length=model.seq_length,
        batch_size=together,
        seed=seed,
        rank=ranks.rank,
        num_ranks=ranks.size,
    )
    description = corpus.name if random_tokens else f"text: {corpus.name}"
    return case, BatchSource(description, lambda step: batches.batch(step * together), device)


def _random(num_tokens: int, seed: int) -> Corpus:
    tokens = np.random.default_rng(seed).integers(num_tokens, size=_NUM_RANDOM_TOKENS)
    name = "random tokens, all equally likely"
    return Corpus(name, tokens, tokens, num_tokens, math.log(num_tokens), is_bytes=False)
