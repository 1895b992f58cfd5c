"""Tests of graphs for parameters whose step counts part, since some calls step only some."""

import copy
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import Batch, Case, check_against_eager, run_as_eager

BOTH = 2
NUM_CALLS = 30
CPU = torch.device("cpu")


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


def case(kinds: Sequence[int], load_at: int | None = None) -> Case:
    """Return one whose calls use these heads in turn; behind a call, a count is another one."""
    indices = itertools.count()

    def batch(generator: torch.Generator) -> Batch:
        sizes = ((8, 4), (8, 1))
        x, y = (torch.randn(size, generator=generator) for size in sizes)
        return Batch((x, y, kinds[next(indices) % NUM_CALLS % len(kinds)]))

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, which: int) -> Tensor:
        return functional.mse_loss(model(x, which), y)

    def start(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        calls = itertools.count(1)

        def after_call() -> None:
            num_calls = next(calls)
            optimizer.param_groups[0]["lr"] = 1e-2 / num_calls
            if num_calls == load_at:
                saved = copy.deepcopy(optimizer.state_dict())
                saved["state"][5]["step"] = torch.tensor(3.0)
                optimizer.load_state_dict(saved)

        return after_call

    return Case(TwoHeads, batch, loss_fn, start)


@pytest.mark.parametrize("on_change", ["recapture", "eager"])
@pytest.mark.parametrize(
    "kinds", [(2, 2, 2, 2, 2, 0, 0, 1, 1), (2, 2, 2, 2, 2, 2, 2, 0), (0, 0, 1)], ids=str
)
def test_each_parameter_goes_on_with_its_own_count(kinds: Sequence[int], on_change: str) -> None:
    got = run_as_eager(case(kinds), CPU, num_steps=NUM_CALLS, on_change=on_change)
    # Counts part, and all graphs stay.
    assert on_change == "eager" or got.report.num_calls["replay"] > NUM_CALLS // 3


def test_replays_go_on_with_loaded_counts_that_differ() -> None:
    check_against_eager(case((BOTH,), load_at=5), CPU, num_steps=NUM_CALLS)
