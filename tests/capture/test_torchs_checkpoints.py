"""torch's own activation checkpointing, as it is written by default, in a captured iteration."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from counting_net import mean_square
from helpers import Case, run_as_eager
from zoo import features

# What torch says of a reentrant checkpoint that no gradient goes through.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def block(dropout: float) -> nn.Module:
    layers = nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8)
    return nn.Sequential(*layers, nn.Dropout(dropout))


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.draws = way != "reentrant, without draws"  # and so without states of generators
        self.blocks = nn.Sequential(*(block(0.3 if self.draws else 0.0) for _ in range(3)))
        self.last = nn.Linear(8, 2)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.way == "sequential":
            hidden = checkpoint_sequential(self.blocks, 2, hidden, use_reentrant=False)
        else:
            options: Any = {"use_reentrant": "reentrant" in self.way}
            for block in self.blocks:
                hidden = hidden + checkpoint(
                    block, hidden, preserve_rng_state=self.draws, **options
                )
        if self.way == "reentrant":  # through which no gradient goes
            with torch.no_grad():
                extra: Any = checkpoint(self.blocks[0], x.new_ones(2, 8), use_reentrant=True)
            hidden = hidden + extra.mean()
        out: Tensor = self.last(hidden)
        return out


@pytest.mark.parametrize("way", ["reentrant", "reentrant, without draws", "by hooks", "sequential"])
def test_dropout_in_it_is_that_of_the_plain_loop(way: str, device: torch.device) -> None:
    case = Case(lambda: Net(way), features(4), mean_square)
    trace = run_as_eager(case, device, beside="plain", optimizer="sgd")
    assert trace.report.num_calls["replay"] == 10
