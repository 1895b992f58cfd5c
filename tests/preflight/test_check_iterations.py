"""graphfsdp.check of iterations of the user's own, with several models and optimizers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import HazardKind
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, line_of, snapshot
from iterations import Optimizer, gan


def reading_gan(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], real: Tensor) -> Any:
    """Looks at a loss after the steps."""
    losses = gan(models, optimizers, real)
    if losses["net"].item() > 1e9:  # read
        raise ValueError("it diverges")
    return losses


def make(device: torch.device) -> tuple[list[nn.Module], list[Optimizer]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 6)).to(device)
    critic = nn.Linear(6, 1).to(device)
    momentum = torch.optim.SGD(critic.parameters(), lr=torch.tensor(0.1, device=device), fused=True)
    return [net, critic], [FusedAdam(net.parameters(), lr=0.1), momentum]


def test_an_iteration_with_two_optimizers_is_checked_and_nothing_changes(
    device: torch.device,
) -> None:
    models, optimizers = make(device)
    pairs = list(zip(models, optimizers, strict=True))
    before = [snapshot(model, optimizer) for model, optimizer in pairs]
    generator = torch.get_rng_state()
    real = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(device)
    report = graphfsdp.check(models, optimizers, real, iteration=gan)
    report.raise_if_any()
    assert report.num_ops > 20
    for held, pair in zip(before, pairs, strict=True):
        assert_same_state(held, snapshot(*pair))
    assert torch.equal(generator, torch.get_rng_state())
    (hazard,) = graphfsdp.check(models, optimizers, real, iteration=reading_gan).hazards
    assert hazard.kind is HazardKind.HOST_READ
    assert hazard.source is not None
    assert hazard.source.line == line_of(reading_gan, "# read")


def test_what_does_not_go_together_is_refused() -> None:
    models, optimizers = make(torch.device("cpu"))
    with pytest.raises(graphfsdp.ConfigError, match="model is a sequence"):
        graphfsdp.check(models, optimizers, torch.ones(2, 6))
    with pytest.raises(graphfsdp.ConfigError, match=r"iteration= .* microbatches"):
        graphfsdp.check(models, optimizers, torch.ones(2, 6), iteration=gan, microbatches=2)
