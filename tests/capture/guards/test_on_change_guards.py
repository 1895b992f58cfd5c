"""What a graph has baked in changes: captured anew, or run eagerly, bit for bit the eager run."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam
from helpers import assert_same_states, make_optimizer, snapshot
from zoo_models import Statistical

NUM_STEPS = 20
CHANGED_AT = 8


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


def train(
    name: str, device: torch.device, **options: Any
) -> tuple[list[dict[str, Tensor]], graphfsdp.CapturedStep]:
    optimizer_name, change = CASES[name]
    torch.manual_seed(0)
    model = Statistical().to(device)
    optimizer = make_optimizer(optimizer_name, model.parameters(), device)
    states = []
    switch = torch.are_deterministic_algorithms_enabled()
    step = graphfsdp.capture(model, optimizer, **options)
    try:
        for index in range(NUM_STEPS):
            if index == CHANGED_AT:
                change(model, optimizer)
            loss = step(torch.randn(6, 5).to(device))
            states.append({"loss": loss, **snapshot(model, optimizer)})
    finally:
        torch.use_deterministic_algorithms(switch)
    return states, step


def compare_with_eager(name: str, device: torch.device, on_change: str) -> Any:
    expected, _ = train(name, device, scope="none", on_change=on_change)
    got, step = train(name, device, on_change=on_change)
    assert_same_states(expected, got)
    step.close()
    return step.report()


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
    def run(scope: str) -> tuple[list[Tensor], graphfsdp.CaptureReport]:
        torch.manual_seed(0)
        model = Statistical().to(device)
        losses = []
        optimizer = FusedAdam(model.parameters())
        with graphfsdp.capture(model, optimizer, scope=scope, on_change="eager") as step:
            for index in range(NUM_STEPS):
                model.train(index not in (6, 7, 12))
                losses.append(step(torch.randn(6, 5).to(device)))
            return losses, step.report()

    expected, _ = run("none")
    got, report = run("full_iteration")
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
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
