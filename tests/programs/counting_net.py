"""A model that counts its calls in Python, and how a capture refuses what follows from a count."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from faults_at_operators import World
from graphfsdp import CaptureError
from graphfsdp.optim import FusedAdam

Loss = Callable[[nn.Module, Tensor], Tensor]


class CountingNet(nn.Module):
    """Counts its calls; what it decides is up to those that derive from it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.late = 50

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.calls += 1
        return self.decide(y).square().mean()

    def decide(self, y: Tensor) -> Tensor:
        return y


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def start(
    loss_fn: Any = mean_square,
    model: nn.Module | None = None,
    *,
    device: str | torch.device = "cpu",
    lr: float = 0.0,
    **options: Any,
) -> tuple[graphfsdp.CapturedStep, Any]:
    """Return a step whose weights do not move unless lr says so, and its model."""
    torch.manual_seed(0)
    model = (nn.Linear(4, 4) if model is None else model).to(device)
    optim = FusedAdam(model.parameters(), lr=lr)
    return graphfsdp.capture(model, optim, loss_fn=loss_fn, **options), model


def refusal_of(loss_fn: Any, model: nn.Module | None = None) -> CaptureError:
    """Train until the capture refuses, and see that nothing has come of that call."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4) if model is None else model
    optim = FusedAdam(model.parameters(), lr=0.01)
    with graphfsdp.capture(model, optim, loss_fn=loss_fn) as step:
        for _ in range(3):
            step(torch.ones(3, 4))
        for _ in range(2):  # what reaches an operator at once may have settled one call later
            world = World(model, optim)
            try:
                step(torch.ones(3, 4))
            except CaptureError as error:
                world.assert_unchanged("refused")
                return error
    pytest.fail("not refused")
