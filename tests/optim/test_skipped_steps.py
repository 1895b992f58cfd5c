"""Steps that are left out on the device."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import assert_same_states, make_optimizer, no_host_sync, snapshot

NUM_STEPS = 16
BAD = (1, 5, 6, 11)  # warm-up and replays


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def test_any_optimizer_can_skip_outside_the_graph(device: torch.device) -> None:
    def train(scope: str) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
        states = [snapshot(model, optimizer)]
        with graphfsdp.capture(
            model, optimizer, loss_fn=loss_fn, skip_nonfinite=True, scope=scope
        ) as step:
            for index in range(NUM_STEPS):
                x = torch.randn(6, 5)
                if index in BAD:
                    x[2, 3] = (torch.inf, torch.nan)[index % 2]
                step(x.to(device))
                states.append(snapshot(model, optimizer))
                moved = not torch.equal(
                    states[-1]["parameter 0.weight"], states[-2]["parameter 0.weight"]
                )
                assert moved == (index not in BAD), index
            assert step.skipped_steps is not None
            assert step.skipped_steps.item() == len(BAD)
        return states

    assert_same_states(train("none"), train("forward_backward"))


def test_looking_at_the_count_waits_for_nothing(device: torch.device) -> None:
    model = nn.Linear(5, 1).to(device)
    optimizer = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, skip_nonfinite=True) as step:
        step(torch.ones(2, 5, device=device))
        with no_host_sync(device):
            first = step.skipped_steps
        bad = torch.full((2, 5), torch.nan, device=device)
        step(bad)
        assert first is not None
        assert first.item() == 0  # a tensor of its own


@pytest.mark.parametrize(
    "names", [("adamw", "adamw"), ("fused_adam", "adamw"), ("adamw", "fused_adam")]
)
def test_skipped_steps_are_in_checkpoints_of_any_optimizer(
    names: tuple[str, str], device: torch.device, tmp_path: Path
) -> None:
    """Loaded before a capture, and into a live graph."""

    def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(5, 1).to(device)
        return model, make_optimizer(name, model.parameters(), device)

    good, bad = torch.ones(2, 5, device=device), torch.full((2, 5), torch.nan, device=device)
    saved, loading = make(names[0]), make(names[1])
    with graphfsdp.capture(*saved, loss_fn=loss_fn, skip_nonfinite=True) as step:
        for x in (good, bad, good, good, bad):
            step(x)
        graphfsdp.save(tmp_path, *saved, step=2)
        step(bad)
        graphfsdp.save(tmp_path, *saved, step=3)
    graphfsdp.load(tmp_path, *loading, step=2)
    with graphfsdp.capture(*loading, loss_fn=loss_fn, skip_nonfinite=True) as step:
        for index in range(5):
            step(bad if index in (1, 4) else good)
        assert step.skipped_steps is not None
        assert step.skipped_steps.item() == 4
        graphfsdp.load(tmp_path, *loading)
        step(bad)
        assert step.skipped_steps.item() == 4
        graphfsdp.load(tmp_path, *loading, step=2)
        assert step.skipped_steps.item() == 2
