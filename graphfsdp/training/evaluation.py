"""Validation loss and a generated sample, neither of which disturbs the training."""

import math

import torch
from torch import Tensor

from graphfsdp import CapturedStep
from graphfsdp.data import Corpus, TokenBatches
from graphfsdp.training.gpt import GPT
from graphfsdp.training.ranks import Ranks

_PROMPT_TOKENS = 32


@torch.no_grad()
def validation_loss(
    model: GPT,
    batches: TokenBatches,
    *,
    num_batches: int,
    batch_size: int,
    ranks: Ranks | None = None,
) -> float:
    """Mean loss in nats per token over fixed batches of the held-out part.

    Ranks share the batches out: all must call this, and all get the same mean, whose terms and
    whose order of addition do not depend on the number of ranks.
    """
    ranks = ranks or Ranks()
    num_rounds = math.ceil(num_batches / ranks.size)
    # Sharded weights are gathered by all ranks together, so each runs equally many batches; one
    # that has none left runs the last again, which is then not counted.
    mine = [min(turn * ranks.size + ranks.rank, num_batches - 1) for turn in range(num_rounds)]
    device = next(model.parameters()).device
    model.eval()  # without dropout, so that nothing is drawn from the generators
    try:
        losses: list[Tensor] = [
            model(*(tensor.to(device) for tensor in batch))
            for batch in batches.validation_batches(num_batches, batch_size, mine)
        ]
    finally:
        model.train()
    in_order = ranks.gather(torch.stack(losses)).T.flatten()[:num_batches]
    return float(in_order.double().mean())


def pipeline_validation_loss(
    step: CapturedStep,
    batches: TokenBatches,
    *,
    num_batches: int,
    batch_size: int,
    width: int,
) -> float:
    """Return the same of a pipeline that splits what it is given into ``width`` micro-batches.

    Each pipeline runs all batches, so many at a time.
    """
    found = list(batches.validation_batches(num_batches, batch_size, range(num_batches)))
    total, full = 0.0, num_batches - num_batches % width
    groups = [found[first : first + width] for first in range(0, full, width)]
    groups += [[batch] * width for batch in found[full:]]
    for number, group in enumerate(groups):
        tokens, targets = (torch.cat(parts) for parts in zip(*group, strict=True))
        loss = step.evaluate(tokens, target=targets).double()
        total += float(loss) * (width if number < full // width else 1)
    return total / len(found)


def generate_sample(
    model: GPT,
    batches: TokenBatches,
    corpus: Corpus,
    *,
    num_tokens: int,
    seed: int,
) -> tuple[str, str]:
    """Continue the start of the held-out part; ranks with a sharded model must all call this.

    Prompt and continuation are text for a corpus of bytes, else token numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = batches.prompt(min(_PROMPT_TOKENS, model.config.seq_length))
    prompt = prompt.to(next(model.parameters()).device)
    tokens = model.generate(prompt, num_tokens, generator=generator)[0].tolist()
    border = prompt.shape[1]
    return _show(tokens[:border], corpus), _show(tokens[border:], corpus)


def _show(tokens: list[int], corpus: Corpus) -> str:
    if not corpus.is_bytes:
        return " ".join(str(token) for token in tokens)
    # A model with a larger vocabulary than bytes need may also draw a token that is none.
    return bytes(token for token in tokens if token < 256).decode(errors="replace")
