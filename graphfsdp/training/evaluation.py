"""Validation loss and a generated sample, neither of which disturbs the training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from graphfsdp.training.corpus import Corpus
from graphfsdp.training.data import BatchSampler
from graphfsdp.training.gpt import GPT

_PROMPT_TOKENS = 32


@contextmanager
def _undisturbed(model: GPT, device: torch.device) -> Iterator[None]:
    """Run the body without dropout and without gradients, then put modes and generators back."""
    was_training = model.training
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


def validation_loss(
    model: GPT, sampler: BatchSampler, *, num_batches: int, batch_size: int, device: torch.device
) -> float:
    """Return the mean loss in nats per token over fixed batches of the held-out part.

    Training continues as if this had not run: modes and generators are put back.
    """
    with _undisturbed(model, device):
        losses: list[Tensor] = [
            model(tokens, targets)
            for tokens, targets in sampler.validation_batches(num_batches, batch_size)
        ]
        return float(torch.stack(losses).double().mean())


def generate_sample(
    model: GPT,
    sampler: BatchSampler,
    corpus: Corpus,
    *,
    num_tokens: int,
    seed: int,
    device: torch.device,
) -> tuple[str, str]:
    """Continue the start of the held-out part.

    Returns:
        Prompt and continuation, as text for a corpus of bytes and else as token numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = sampler.prompt(min(_PROMPT_TOKENS, model.config.seq_length))
    with _undisturbed(model, device):
        tokens = model.generate(prompt, num_tokens, generator=generator)[0].tolist()
    border = prompt.shape[1]
    return _show(tokens[:border], corpus), _show(tokens[border:], corpus)


def _show(tokens: list[int], corpus: Corpus) -> str:
    if not corpus.is_bytes:
        return " ".join(str(token) for token in tokens)
    # A model with a larger vocabulary than bytes need may also draw a token that is none.
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


__all__ = ["generate_sample", "validation_loss"]
