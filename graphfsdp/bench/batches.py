"""The inputs of a case: another batch for each step, the same for every contender.

Shapes: B = samples of a batch, T = tokens of a sequence, P = masked places.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphfsdp.bench.models import NUM_COLOURS, NUM_SPECIAL, BertConfig, ConvConfig
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
    if isinstance(model, ConvConfig):
        description = "made-up images: a pattern for each class, and noise"
        make = _images(model, rows, seed)
    elif isinstance(model, ZooConfig):
        description, random = "random numbers", model.architecture.batch

        def make_random(generator: np.random.Generator) -> Batch:
            number = int(generator.integers(2**62))
            return random(torch.Generator().manual_seed(number), rows)

        make = make_random
    else:
        if random_tokens:
            num_special = NUM_SPECIAL if isinstance(model, BertConfig) else 0
            description = "random tokens, all equally likely"
            windows = _random(model.vocab_size - num_special)
        else:
            corpus = load_corpus(data)
            case = Case(case.workload.with_vocabulary(corpus.vocab_size), case.dtype, rows)
            description, windows = f"text: {corpus.name}", _text(corpus, model.seq_length)
        grown = case.workload.model
        if isinstance(grown, BertConfig):
            make = functools.partial(masked_batch, grown, windows, rows)
        else:
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


def masked_batch(
    config: BertConfig, windows: _Windows, batch_size: int, generator: np.random.Generator
) -> Batch:
    """Return tokens, segments, places, targets and order for ``BertModel``.

    A sequence is [CLS] first half [SEP] second half [SEP]. In half of the sequences the second
    half is what follows the first in the text, else it is from elsewhere. Of the places that are
    predicted, 80 % become [MASK], 10 % another token, and 10 % stay.

    Source: Devlin et al. 2018 (arXiv:1810.04805), section 3.1, as MLPerf's BERT.
    """
    length, num_text_tokens = config.seq_length, config.vocab_size - NUM_SPECIAL
    cls, separator, mask = range(num_text_tokens, config.vocab_size)
    room = length - NUM_SPECIAL
    first = room // 2
    text = windows(generator, batch_size, room)
    elsewhere = windows(generator, batch_size, room - first)
    follows = generator.integers(2, size=batch_size)
    text[:, first:] = np.where(follows[:, None] == 1, text[:, first:], elsewhere)
    ends = {0: cls, first + 1: separator, length - 1: separator}
    tokens = np.empty((batch_size, length), dtype=np.int64)
    tokens[:, list(ends)] = list(ends.values())
    is_text = np.ones(length, dtype=bool)
    is_text[list(ends)] = False
    tokens[:, is_text] = text
    segments = np.broadcast_to(np.arange(length) > first + 1, tokens.shape).astype(np.int64)
    order = generator.random((batch_size, room)).argsort(axis=1)[:, : config.num_masked]
    places = np.flatnonzero(is_text)[np.sort(order, axis=1)]
    targets = np.take_along_axis(tokens, places, axis=1)
    dice = generator.random(places.shape)
    other = generator.integers(num_text_tokens, size=places.shape)
    shown = np.where(dice < 0.8, mask, np.where(dice < 0.9, other, targets))
    np.put_along_axis(tokens, places, shown, axis=1)
    return tuple(torch.from_numpy(array) for array in (tokens, segments, places, targets, follows))


def _images(
    config: ConvConfig, batch_size: int, seed: int
) -> Callable[[np.random.Generator], Batch]:
    size = (config.num_classes, NUM_COLOURS, config.image_size, config.image_size)
    patterns = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)

    def make(generator: np.random.Generator) -> Batch:
        classes = generator.integers(config.num_classes, size=batch_size)
        noise = generator.standard_normal((batch_size, *size[1:]), dtype=np.float32)
        return torch.from_numpy(patterns[classes] + noise), torch.from_numpy(classes)

    return make
