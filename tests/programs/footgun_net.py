"""A net whose loss shows what a captured step computes."""

from typing import Any

import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam

NUM_EAGER = 4  # 3 warm-up calls and the recording


class Net(nn.Module):
    """A linear layer and room for what tests put in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.dropout(self.layer(x)).square().mean()
        return loss


def start(
    device: torch.device, loss_fn: Any = None, *, lr: float = 0.0, model: Any = None, **options: Any
) -> tuple[graphfsdp.CapturedStep, Net, FusedAdam]:
    """Return a step whose weights do not move unless lr says so."""
    torch.manual_seed(0)
    model = (model or Net()).to(device)
    optim = FusedAdam(model.parameters(), lr=lr)
    return graphfsdp.capture(model, optim, loss_fn=loss_fn, **options), model, optim


def inputs(device: torch.device) -> Tensor:
    return torch.arange(32.0, device=device).view(8, 4) / 32
