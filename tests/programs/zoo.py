"""Small models with batches that fit; every batch has 12 rows.

The architectures are those of ``graphfsdp bench --suite zoo``; what else a graph has to hold of a
model (odd shapes, writes in place, double backward, ...) is in zoo_models.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zoo_models as models
from graphfsdp.bench.workloads import Workload, architectures
from helpers import Batch, Case
from zoo_models import TOKENS, VOCABULARY, WIDTH

ROWS = 12  # divisible into 1, 2 and 3 microbatches


def features(*shape: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        return Batch((torch.randn(ROWS, *shape, generator=generator),))

    return make


def tokens(generator: torch.Generator) -> Batch:
    ids = torch.randint(0, VOCABULARY, (2, ROWS, TOKENS), generator=generator)
    return Batch((ids[0], ids[1]))


def keyword_batch(generator: torch.Generator) -> Batch:
    x = torch.randn(ROWS, WIDTH, generator=generator)
    scale = torch.rand(ROWS, generator=generator)
    batch = {"x": x, "nested": {"mask": (x > 0).float()}}
    return Batch((batch,), {"scales": [scale, x.flip(0)], "power": 2, "mode": "mean"})


def loss_with_extras(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return auxiliary results in every form that torch's pytrees know."""
    output = model(x)
    largest = output.logits.max(dim=1)
    return output.loss, {
        "values": (largest.values, [largest.indices]),
        "input": x,
        "transposed": output.logits.t(),
        "correct": largest.values > 0,
    }


def autocast_loss(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss: Tensor = model(x)
    return loss


def checkpointed_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Recompute activations; nothing random runs inside."""
    from torch.utils.checkpoint import checkpoint

    result = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result


def per_row_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Run the model and its gradients under vmap, with its parameters as arguments."""

    def one(params: dict[str, Tensor], row: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(model, params, (row.unsqueeze(0),))
        return loss

    of_rows = torch.vmap(torch.func.grad_and_value(one), in_dims=(None, 0))
    grads, losses = of_rows(dict(model.named_parameters()), x)
    loss: Tensor = losses.mean() + sum(grad.square().mean() for grad in grads.values())
    return loss


def bag_batch(generator: torch.Generator) -> Batch:
    return Batch((torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator),))


def rows_of(workload: Workload) -> Callable[[torch.Generator], Batch]:
    batch = workload.batch
    assert batch is not None
    return lambda generator: Batch(batch(generator, ROWS))


BENCH = {
    "mixture_of_experts" if each.name == "zoo-experts" else each.name: Case(
        each.make, rows_of(each)
    )
    for each in architectures()
}
ZOO: dict[str, Case] = {
    "mlp": Case(models.mlp, features(WIDTH)),
    "conv_net": Case(models.conv_net, features(3, 8, 8)),
    "channels_last": Case(models.channels_last, features(3, 8, 8)),
    "gpt": Case(models.gpt, tokens),
    "lstm": Case(
        lambda: models.Squared(models.Head(nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True))),
        features(4, 5),
    ),
    "lstm_cells": Case(models.LSTMCells, features(4, WIDTH)),
    "unused_parameter": Case(models.UnusedParameter, features(WIDTH)),
    "rotary": Case(models.Rotary, features(WIDTH)),
    "odd_shapes": Case(models.OddShapes, features(WIDTH)),
    "shared_layer": Case(models.Shared, features(WIDTH)),
    "autograd_function": Case(models.StraightThrough, features(WIDTH)),
    "parametrized": Case(models.parametrized, features(WIDTH)),
    "moving_average": Case(models.MovingAverage, features(WIDTH)),
    "in_place": Case(models.InPlace, features(WIDTH)),
    "gradient_penalty": Case(models.GradientPenalty, features(WIDTH)),
    "keywords": Case(models.Keywords, keyword_batch),
    "model_output": Case(models.WithOutput, features(WIDTH)),
    "extras": Case(models.WithOutput, features(WIDTH), loss_with_extras),
    "autocast": Case(models.mlp, features(WIDTH), autocast_loss),
    "checkpoint": Case(
        lambda: models.Squared(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)),
        features(WIDTH),
        checkpointed_loss,
    ),
    "vmap": Case(
        lambda: models.Squared(nn.Linear(WIDTH, 8), nn.Tanh()), features(WIDTH), per_row_loss
    ),
    "encoder_layer": Case(
        lambda: models.Squared(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True)),
        features(4, WIDTH),
    ),
    "embedding_bag": Case(
        lambda: models.Squared(
            nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean"), nn.Linear(WIDTH, 3)
        ),
        bag_batch,
    ),
    "norms": Case(
        lambda: models.Squared(
            nn.Conv1d(4, 6, 3), nn.GroupNorm(2, 6), nn.PReLU(), nn.InstanceNorm1d(6, affine=True)
        ),
        features(4, 9),
    ),
    "float64": Case(
        lambda: models.Squared(nn.Linear(WIDTH, 4)).double(),
        lambda g: Batch((torch.randn(ROWS, WIDTH, generator=g).double(),)),
    ),
    "alpha_dropout": Case(
        lambda: models.Squared(nn.Linear(WIDTH, WIDTH), nn.Hardtanh(), nn.AlphaDropout(0.2)),
        features(WIDTH),
    ),
    **BENCH,
}
