"""The inputs of a case: another batch for each step, the same for every contender.

Shapes: B = samples of a batch, T = tokens of a sequence.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphfsdp.bench.workloads import Case, ZooConfig
from graphfsdp.data import Corpus, load_corpus
from graphfsdp.errors import ConfigError

Batch = tuple[Tensor, ...]
_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchSource:
    """Makes batches by number; a batch depends on seed, step and rank alone."""

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
    rank: int = 0,
) -> tuple[Case, BatchSource]:
    """Also returns the case with a vocabulary that holds its tokens.

    ``data`` is what ``graphfsdp train --data`` takes; None is Python's standard library.
    """
    model, rows = case.workload.model, case.batch_size
    make: Callable[[np.random.Generator], Batch]
    if isinstance(model, ZooConfig):
        description, random = "random numbers", model.architecture.batch

        def make_random(generator: np.random.Generator) -> Batch:
            number = int(generator.integers(2**62))
            return random(torch.Generator().manual_seed(number), rows)

        make = make_random
    else:
        if random_tokens:
            description = "random tokens, all equally likely"
            windows = _random(model.vocab_size)
        else:
            corpus = load_corpus(data)
            case = Case(case.workload.with_vocabulary(corpus.vocab_size), case.dtype, rows)
            description, windows = f"text: {corpus.name}", _text(corpus, model.seq_length)
        make = functools.partial(_next_tokens, windows, rows, model.seq_length)

    def numbered(step: int) -> Batch:
        return make(np.random.default_rng((seed, step, rank)))

    return case, BatchSource(description, numbered, device)


# Cuts so many windows of so many tokens.
_Windows = Callable[[np.random.Generator, int, int], _Integers]


def _random(num_tokens: int) -> _Windows:
    return lambda generator, rows, length: generator.integers(num_tokens, size=(rows, length))


def _text(corpus: Corpus, seq_length: int) -> _Windows:
    tokens = corpus.train
    if len(tokens) < seq_length + 1:
        raise ConfigError(
            f"{corpus.name} has {len(tokens)} tokens to train on, a sequence needs "
            f"{seq_length + 1}; give a larger --data, or --random-tokens"
        )

    def cut(generator: np.random.Generator, rows: int, length: int) -> _Integers:
        starts = generator.integers(len(tokens) - length + 1, size=rows)
        cut: _Integers = tokens[starts[:, None] + np.arange(length)].astype(np.int64)
        return cut

    return cut


def _next_tokens(
    windows: _Windows, batch_size: int, seq_length: int, generator: np.random.Generator
) -> Batch:
    cut = torch.from_numpy(windows(generator, batch_size, seq_length + 1))
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()
