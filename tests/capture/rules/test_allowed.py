"""What nothing refuses: what looks forbidden or odd replays as eager runs, bit for bit.

Below are surprises of a captured step: what happens now, and what one would expect. What is
refused is in test_refused.py and in the tests of the guards.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from allowed_programs import ALLOWED, ALLOWED_ON_A_CPU, CONSTANT_READS
from catalogue import CATALOGUE
from counting_net import mean_square, start
from helpers import Case, assert_alive, assert_same_run, check_against_eager, run, run_as_eager
from mid_forward import check_captured
from zoo import ZOO, features

CPU = torch.device("cpu")
ONLY_ON_A_CPU = ALLOWED_ON_A_CPU | CONSTANT_READS


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_graph_can_hold_is_captured(name: str, device: torch.device) -> None:
    check_captured(ALLOWED[name], device)


@pytest.mark.parametrize("name", ONLY_ON_A_CPU)
def test_what_a_cpu_graph_can_hold_is_captured(name: str) -> None:
    check_captured(ONLY_ON_A_CPU[name], CPU)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp uses it
def test_an_odd_program_replays_as_eager_runs(name: str) -> None:
    check_against_eager(CATALOGUE[name], CPU)


def test_hooks_of_a_step_replay_with_an_optimizer_of_torch() -> None:
    check_against_eager(CATALOGUE["step_hooks"], CPU, optimizer="sgd")


def test_an_old_graph_raises(device: torch.device) -> None:
    """The weights that an older forward pass saved have been written since."""
    step, model = start(device=device, lr=0.1)
    x = torch.ones(3, 4, device=device)
    for _ in range(5):
        step(x)
    hidden = mean_square(model, x.clone().requires_grad_())
    step(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.backward()


def test_autocast_around_the_loop_uses_no_stale_weights(device: torch.device) -> None:
    """Its cache of casted weights outlives a call, and the weights change in between."""
    expected = run(ZOO["autocast"], "plain", device)  # is entered in each call
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for scope in ("none", "forward_backward", "full_iteration"):
            assert_same_run(expected, run(ZOO["mlp"], scope, device))
    assert_alive(expected)


# What torch says of a reentrant checkpoint that no gradient goes through.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def block(dropout: float) -> nn.Module:
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Linear(16, 8)
    return nn.Sequential(*layers, nn.Dropout(dropout))


class Checkpointed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.draws = way != "reentrant, without draws"  # and so without states of generators
        blocks = [block(0.3 if self.draws else 0.0) for _ in range(3)]
        # Each twice, and one twice again: a reentrant checkpoint adds up its own uses first.
        self.blocks = nn.Sequential(*(nn.Sequential(each, each) for each in (*blocks, blocks[0])))
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
def test_what_it_draws_and_writes_is_that_of_the_plain_loop(way: str, device: torch.device) -> None:
    case = Case(lambda: Checkpointed(way), features(4), mean_square)
    trace = run_as_eager(case, device, beside="plain", optimizer="sgd")
    assert trace.report.num_calls["replay"] == 10
