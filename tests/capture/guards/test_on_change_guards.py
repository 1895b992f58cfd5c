"""What a graph has baked in changes: captured anew, or run eagerly, bit for bit the eager run."""

import itertools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import Phase
from helpers import Case, run_as_eager
from zoo import features
from zoo_models import Statistical

NUM_STEPS = 20
CHANGED_AT = 8


AROUND = types.SimpleNamespace(scale=1.0)  # what the loss reads beside the model
Change = Callable[[Statistical, torch.optim.Optimizer], Any]


def another_module(model: Statistical, optimizer: torch.optim.Optimizer) -> None:
    model.last = nn.Linear(8, 1).to(model.first.weight.device)
    optimizer.add_param_group({"params": list(model.last.parameters())})


def replaced_state(model: Statistical, optimizer: torch.optim.Optimizer) -> None:
    for entries in optimizer.state.values():
        entries["exp_avg"] = entries["exp_avg"].clone()


CASES: dict[str, tuple[str, Change]] = {
    "evaluation_mode": ("fused_adam", lambda model, optimizer: model.eval()),
    "a_number": ("fused_adam", lambda model, optimizer: setattr(model, "scale", 0.5)),
    "a_number_around": ("fused_adam", lambda *trained: setattr(AROUND, "scale", 0.5)),
    "a_baked_number": (
        "adamw",
        lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    ),
    "a_hook": (
        "fused_adam",
        lambda model, optimizer: model.first.register_forward_hook(lambda _, args, out: out * 2),
    ),
    "a_frozen_parameter": (
        "fused_adam",
        lambda model, optimizer: model.first.requires_grad_(False),
    ),
    "another_module": ("fused_adam", another_module),
    "another_module_of_sgd": ("sgd", another_module),
    "moved_memory": (
        "fused_adam",
        lambda model, optimizer: setattr(
            model.first.weight, "data", model.first.weight.detach().clone()
        ),
    ),
    "replaced_state": ("adamw", replaced_state),
    "a_switch": (
        "fused_adam",
        lambda model, optimizer: torch.use_deterministic_algorithms(
            not torch.are_deterministic_algorithms_enabled()
        ),
    ),
}


@pytest.fixture(autouse=True)
def _switches_stay() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def changing(between: Callable[[int, Any, torch.optim.Optimizer], object]) -> Case:
    """Return a training in which something happens before each call but the first."""

    def setup(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        AROUND.scale = 1.0
        calls = itertools.count(1)
        return lambda: between(next(calls), model, optimizer)

    return Case(Statistical, features(5), lambda model, x: model(x) * AROUND.scale, setup)


def compare_with_eager(name: str, device: torch.device, on_change: str) -> Any:
    optimizer, change = CASES[name]
    case = changing(lambda index, *trained: index == CHANGED_AT and change(*trained))
    options: dict[str, Any] = {"optimizer": optimizer, "num_steps": NUM_STEPS}
    return run_as_eager(case, device, on_change=on_change, **options).report


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_captured_anew(
    name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="graphfsdp"):
        report = compare_with_eager(name, device, "recapture")
    assert report.num_calls == {"warmup": 4, "capture": 2, "replay": NUM_STEPS - 6}
    assert caplog.text.count("all graphs are given up") == 1
    assert " was " in caplog.text  # what it was that has changed


@pytest.mark.parametrize("name", CASES)
def test_a_change_runs_eagerly(name: str, device: torch.device) -> None:
    report = compare_with_eager(name, device, "eager")
    assert report.num_captures == 1
    assert report.num_calls["eager"] == NUM_STEPS - CHANGED_AT


def test_a_change_that_is_undone_leaves_the_graph(device: torch.device) -> None:
    case = changing(lambda index, model, _: model.train(index not in (6, 7, 12)))
    report = run_as_eager(case, device, num_steps=NUM_STEPS, on_change="eager").report
    assert report.num_calls == {"warmup": 3, "capture": 1, "replay": NUM_STEPS - 7, "eager": 3}


def test_a_change_between_two_captures_spoils_the_first_graph(device: torch.device) -> None:
    """Baked numbers are those of all graphs: a second kind of batch does not hide a change."""

    def run(scope: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Statistical().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
        losses = []
        with graphfsdp.capture(model, optimizer, scope=scope, on_change="recapture") as step:
            for index in range(16):
                if index == 6:  # the call that would capture the second kind
                    optimizer.param_groups[0]["lr"] = 0.1
                rows = 4 if 5 <= index < 9 else 6
                losses.append(step(torch.randn(rows, 5).to(device)))
            assert step.phase is (Phase.EAGER if scope == "none" else Phase.REPLAY)
        return losses

    assert all(torch.equal(a, b) for a, b in zip(run("none"), run("full_iteration"), strict=True))
