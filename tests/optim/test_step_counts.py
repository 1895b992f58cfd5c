"""Tests of graphs for parameters whose step counts part, since some calls step only some."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, assert_same_states, quick_garbage_collection, snapshot

BOTH = 2
NUM_CALLS = 30


class TwoHeads(nn.Module):
    """A trunk and two heads, of which a call uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        hidden = self.trunk(x).tanh()
        used = self.heads if which == BOTH else [self.heads[which]]
        total: Tensor = sum(head(hidden) for head in used)
        return total


def loss_fn(model: nn.Module, x: Tensor, y: Tensor, which: int) -> Tensor:
    return functional.mse_loss(model(x, which), y)


def start(**options: Any) -> tuple[graphfsdp.CapturedStep, nn.Module, FusedAdam]:
    quick_garbage_collection()
    torch.manual_seed(5)
    model = TwoHeads()
    optim = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    return graphfsdp.capture(model, optim, loss_fn=loss_fn, **options), model, optim


def batches() -> Callable[[], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return lambda: (torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator))


@pytest.mark.parametrize("on_change", ["recapture", "eager"])
@pytest.mark.parametrize(
    "kinds", [(2, 2, 2, 2, 2, 0, 0, 1, 1), (2, 2, 2, 2, 2, 2, 2, 0), (0, 0, 1)], ids=str
)
def test_each_parameter_goes_on_with_its_own_count(kinds: Sequence[int], on_change: str) -> None:
    def train(scope: str) -> tuple[list[dict[str, Tensor]], graphfsdp.CaptureReport]:
        step, model, optim = start(scope=scope, on_change=on_change)
        batch, states = batches(), []
        for index in range(NUM_CALLS):
            optim.param_groups[0]["lr"] = 1e-2 / (1 + index)
            loss = step(*batch(), kinds[index % len(kinds)])
            states.append(snapshot(model, optim) | {"loss": loss})
        return states, step.report()

    expected, _ = train("none")
    got, report = train("full_iteration")
    assert_same_states(expected, got)
    # Counts part, and all graphs stay.
    if on_change == "recapture":
        assert report.num_calls["replay"] > NUM_CALLS // 3


def test_replays_go_on_with_loaded_counts_that_differ() -> None:
    def train(scope: str) -> dict[str, Tensor]:
        step, model, optim = start(scope=scope)
        batch = batches()
        for _ in range(5):
            step(*batch(), BOTH)
        saved = copy.deepcopy(optim.state_dict())
        saved["state"][5]["step"] = torch.tensor(3.0)
        optim.load_state_dict(saved)
        for _ in range(3):
            step(*batch(), BOTH)
        return snapshot(model, optim)

    assert_same_state(train("none"), train("full_iteration"))
