"""`graphfsdp.save` and `graphfsdp.load` in one process: bits, addresses, live graphs, reports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import graphfsdp
from checkpoint_helpers import (
    addresses,
    contents,
    digests,
)
from graphfsdp.optim import FusedAdam

Step = graphfsdp.CapturedStep


class Small(nn.Module):
    """Dropout, a buffer that changes, tied weights and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 4)
        self.tied = nn.Linear(4, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training)
        loss: Tensor = self.tied(self.last(hidden)).square().mean() + self.frozen.sum() * 0
        return loss


def small(
    device: torch.device, seed: int, **options: Any
) -> tuple[Small, FusedAdam, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    model = Small().to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.05, weight_decay=0.1, **options)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def run(step: Step, scheduler: Any, device: torch.device, first: int, last: int) -> list[Tensor]:
    """Train on batches that depend on the iteration's number alone."""
    losses = []
    for index in range(first, last):
        generator = torch.Generator().manual_seed(index)
        losses.append(step(torch.randn(8, 4, generator=generator).to(device)))
        scheduler.step()
    return losses


def assert_equal_states(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    assert digests(contents(*left)) == digests(contents(*right))
    for name, buffer in left[0].named_buffers():
        assert torch.equal(buffer, right[0].get_buffer(name)), name


@pytest.mark.parametrize("scope", ["none", "full_iteration"])
@pytest.mark.parametrize("saved_scope", ["none", "full_iteration"])
def test_a_run_that_loads_midway_goes_on_like_the_one_that_saved(
    saved_scope: str, scope: str, device: torch.device, tmp_path: Path
) -> None:
    """The loading one is in the middle of its replays, and is not captured again."""
    model, optimizer, scheduler = small(device, 0)
    with graphfsdp.capture(model, optimizer, scope=saved_scope, max_grad_norm=1.0) as step:
        run(step, scheduler, device, 0, 7)
        graphfsdp.save(tmp_path, model, optimizer, objects={"lr": scheduler}, step=7)
        expected = run(step, scheduler, device, 7, 19)
    other, its_optimizer, its_scheduler = small(device, 1)
    with graphfsdp.capture(other, its_optimizer, scope=scope, max_grad_norm=1.0) as step:
        run(step, its_scheduler, device, 100, 109)
        before = addresses(other, its_optimizer)
        loaded = graphfsdp.load(tmp_path, other, its_optimizer, objects={"lr": its_scheduler})
        assert (loaded.step, loaded.path) == (7, tmp_path / "step-00000007")
        assert addresses(other, its_optimizer) == before
        got = run(step, its_scheduler, device, 7, 19)
        assert step.report().num_captures == (scope == "full_iteration")
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert_equal_states((model, optimizer), (other, its_optimizer))
    assert its_scheduler.get_last_lr() == scheduler.get_last_lr()


def test_generators_are_saved_and_set(device: torch.device, tmp_path: Path) -> None:
    import random

    import numpy

    def draw() -> list[Any]:
        return [
            torch.rand(3).tolist(),
            torch.rand(3, device=device).tolist(),
            random.random(),
            numpy.random.rand(),
            numpy.random.randn(),
        ]

    model = nn.Linear(2, 2)
    draw()
    graphfsdp.save(tmp_path, model)
    expected = draw()
    graphfsdp.load(tmp_path, model, rng=False)
    assert draw() != expected
    graphfsdp.load(tmp_path, model)
    assert draw() == expected


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    """Everything is JSON or raw bytes behind JSON: reading it cannot run code."""
    model, optimizer, scheduler = small(torch.device("cpu"), 0)
    folder = graphfsdp.save(tmp_path, model, optimizer, objects={"lr": scheduler})
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["data-00000-0.safetensors", "manifest.json"]
    json.loads((folder / "manifest.json").read_text())
    read = load_file(folder / names[0])
    assert torch.equal(read["model.first.weight"], model.first.weight)


def test_old_checkpoints_go_and_a_step_can_be_chosen(tmp_path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    for step in (5, 10, 15, 15):
        with torch.no_grad():
            model.weight.fill_(step + len(list(tmp_path.iterdir())) / 100)
        last = model.weight.item()
        graphfsdp.save(tmp_path, model, step=step, keep_last=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-00000010", "step-00000015.1"]
    assert graphfsdp.load(tmp_path, model).step == 15
    assert model.weight.item() == last
    assert graphfsdp.load(tmp_path, model, step=10).step == 10
    assert int(model.weight) == 10
    with pytest.raises(graphfsdp.CheckpointError, match=r"no checkpoint of step 5.*step=10, 15"):
        graphfsdp.load(tmp_path, model, step=5)
    assert graphfsdp.save(tmp_path, model).name == "step-00000016"
    with pytest.raises(graphfsdp.CheckpointError, match="nothing has been saved there"):
        graphfsdp.load(tmp_path / "latest", model)


def test_who_goes_back_keeps_what_the_run_goes_on_from(tmp_path: Path) -> None:
    """And not the later ones in its place, which may be damaged."""
    model = nn.Linear(1, 1, bias=False)

    def save(step: int) -> list[str]:
        graphfsdp.save(tmp_path, model, step=step, keep_last=2)
        return sorted(path.name for path in tmp_path.iterdir())

    for step in (10, 20):
        save(step)
    graphfsdp.load(tmp_path, model, step=10)
    assert save(15) == ["latest", "step-00000010", "step-00000015", "step-00000020"]
    assert graphfsdp.load(tmp_path, model).step == 15
    assert save(20) == ["latest", "step-00000015", "step-00000020.1"]
