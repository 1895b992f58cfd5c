"""torch's own activation checkpointing, as it is written by default, in a captured iteration."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import graphfsdp

# What torch says of a reentrant checkpoint that no gradient goes through.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.down(self.drop(nn.functional.gelu(self.up(x)))))
        return out


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.last = nn.Linear(8, 2)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.way == "sequential":
            hidden = checkpoint_sequential(self.blocks, 2, hidden, use_reentrant=False)
        else:
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=self.way == "reentrant")
        if self.way == "reentrant":  # through which no gradient goes
            with torch.no_grad():
                extra: Any = checkpoint(self.blocks[0], x.new_ones(2, 8), use_reentrant=True)
            hidden = hidden + extra.mean()
        out: Tensor = self.last(hidden)
        return out


def batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(6, 4, generator=generator).to(device), torch.zeros(6, 2, device=device))
        for _ in range(16)
    ]


def train(way: str, device: torch.device, *, captured: bool) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = Net(way).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), y)

    losses = []
    if captured:
        with graphfsdp.capture(model, optimizer, loss_fn=loss_fn) as step:
            for index, batch in enumerate(batches(device)):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + index % 3)
                losses.append(step(*batch).item())
            assert step.phase is graphfsdp.Phase.REPLAY
    else:
        for index, batch in enumerate(batches(device)):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + index % 3)
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    state = [param.detach().clone() for param in model.parameters()]
    return losses, [*state, torch.get_rng_state()]


@pytest.mark.parametrize("way", ["reentrant", "by hooks", "sequential"])
def test_dropout_in_it_is_that_of_the_plain_loop(way: str, device: torch.device) -> None:
    losses, state = train(way, device, captured=False)
    found_losses, found = train(way, device, captured=True)
    assert losses == found_losses
    assert all(torch.equal(one, other) for one, other in zip(state, found, strict=True))
