"""Batches: random windows for training, fixed windows for validation.

Shapes: B = sequences of a batch, T = tokens of a sequence.
"""

import re
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphfsdp.errors import ConfigError
from graphfsdp.training.corpus import Corpus, TokenArray

# A sample starts at a line that begins with a letter, if there is one among so many bytes.
_PROMPT_SEARCH_BYTES = 1 << 16


class BatchSampler:
    """Cuts batches out of a corpus.

    The batch of a step depends on the seed and the step alone. So a resumed run needs no data
    position, and nothing is drawn from torch's global generator, which dropout uses. Ranks that
    train together draw the same batch and take a part of it each, whatever their number.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_length: int,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Prepare to cut windows of ``seq_length`` tokens and the one that follows.

        Args:
            corpus: Where to cut.
            seq_length: Tokens of a sequence.
            batch_size: Sequences of a training batch, all micro-batches and ranks together.
            seed: Another seed gives other batches.
            device: Where batches go.
            rank: Which part of each training batch is this process's.
            num_ranks: How many equal parts there are; divides ``batch_size``.

        Raises:
            ConfigError: a part of the corpus is shorter than one window.
        """
        for part, tokens in (("training", corpus.train), ("held-out", corpus.validation)):
            if len(tokens) < seq_length + 1:
                raise ConfigError(
                    f"--seq-length {seq_length} needs {seq_length + 1} tokens in a row, but the "
                    f"{part} part of {corpus.name} has {len(tokens)}; give a smaller "
                    f"--seq-length or a larger --data"
                )
        self._corpus = corpus
        self._window = np.arange(seq_length + 1)
        self._batch_size = batch_size
        size = batch_size // num_ranks
        self._part = slice(rank * size, (rank + 1) * size)
        self._seed = seed
        self._device = device

    def training_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's part of iteration ``step``, from 0: tokens and targets, [B, T]."""
        generator = np.random.default_rng((self._seed, step))
        num_starts = len(self._corpus.train) - len(self._window) + 1
        starts = generator.integers(num_starts, size=self._batch_size)
        return self._cut(self._corpus.train, starts[self._part])

    def validation_batches(
        self, num_batches: int, batch_size: int, chosen: Iterable[int] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same batches at each call: windows at even distances in the held-out part.

        Args:
            num_batches: How many there are.
            batch_size: Sequences of each.
            chosen: Numbers of those to yield; all if not given.
        """
        last_start = len(self._corpus.validation) - len(self._window)
        starts = np.linspace(0, last_start, num_batches * batch_size).astype(np.int64)
        batches = starts.reshape(num_batches, batch_size)
        for number in range(num_batches) if chosen is None else chosen:
            yield self._cut(self._corpus.validation, batches[number])

    def prompt(self, num_tokens: int) -> Tensor:  # [1, num_tokens] int64
        """Return tokens of the held-out part for a sample to continue, near its start."""
        held_out, start = self._corpus.validation, 0
        if self._corpus.is_bytes:
            nearby = held_out[: max(len(held_out) - num_tokens, 0)][:_PROMPT_SEARCH_BYTES]
            line = re.search(rb"(?<=\n)[A-Za-z]", nearby.tobytes())
            start = line.start() if line else 0
        tokens = held_out[start : start + num_tokens].astype(np.int64)
        return torch.from_numpy(tokens)[None].to(self._device)

    def _cut(self, tokens: TokenArray, starts: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(tokens[starts[:, None] + self._window].astype(np.int64))
        if self._device.type == "cuda":
            # A copy from pinned memory does not make the host wait.
            windows = windows.pin_memory().to(self._device, non_blocking=True)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
