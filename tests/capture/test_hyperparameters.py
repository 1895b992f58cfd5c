"""Hyper-parameters are data: whatever changes between replays takes effect in the next one."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import Case, Trace, assert_same_run, assert_same_state, run, snapshot
from iterations import steps_once
from make_step import make_step
from zoo import ZOO

Change = Callable[[int], dict[str, Any]]  # of groups, after each call
BOTH, FIRST, SECOND = (0, 1), (0,), (1,)


def train(
    scope: str,
    device: torch.device,
    change: Change,
    groups: tuple[int, ...] = BOTH,
) -> Trace:
    """Train two groups: matrices, and the rest without weight decay."""

    def setup(model: nn.Module, optim: torch.optim.Optimizer) -> Callable[[], object]:
        params = list(model.parameters())
        optim.param_groups[0]["params"] = [param for param in params if param.dim() >= 2]
        rest = [param for param in params if param.dim() < 2]
        optim.add_param_group({"params": rest, "weight_decay": 0.0})
        calls = itertools.count()

        def tick() -> None:
            changed = change(next(calls))
            for index in groups:
                optim.param_groups[index].update(changed)

        return tick

    case = Case(ZOO["mlp"].make, ZOO["mlp"].batch, setup=setup)
    return run(case, scope, device, max_grad_norm=0.1)


@functools.cache
def unchanged(device: torch.device) -> Tensor:
    """Return a weight after a run in which nothing is changed."""
    return train("none", device, lambda index: {}).snapshots[-1][WEIGHT]


WEIGHT = "parameter layers.0.weight"
CHANGES: dict[str, tuple[Change, tuple[int, ...]]] = {
    "lr": (lambda index: {"lr": 0.1 / (index + 1)}, BOTH),
    "weight_decay": (lambda index: {"weight_decay": 0.1 * index}, BOTH),
    "beta1": (lambda index: {"betas": (0.9 - 0.05 * index, 0.95)}, BOTH),
    "beta2": (lambda index: {"betas": (0.9, 0.999 - 0.01 * index)}, BOTH),
    "eps": (lambda index: {"eps": 10.0**-index}, BOTH),
    "lr_to_zero_and_back": (lambda index: {"lr": 0.01 * (index % 2)}, BOTH),
    "lr_as_integer": (lambda index: {"lr": index % 2}, BOTH),
    "in_one_group": (lambda index: {"weight_decay": 0.1 * index}, SECOND),
    "for_one_call": (lambda index: {"lr": 0.5 if index == 9 else 0.01}, FIRST),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_by_hand_takes_effect_in_the_next_replay(name: str, device: torch.device) -> None:
    expected = train("none", device, *CHANGES[name])
    for scope in ("full_iteration", "forward_backward"):
        assert_same_run(expected, train(scope, device, *CHANGES[name]))
    before = unchanged(device)
    assert not torch.equal(before, expected.snapshots[-1][WEIGHT]), "the change had no effect"


REFUSED = graphfsdp.ConfigError, graphfsdp.GuardError


@pytest.mark.parametrize(
    ("optimizer", "name", "value", "message"),
    [
        # Out of range.
        ("fused_adam", "lr", -1.0, "lr"),
        ("fused_adam", "betas", (1.0, 0.9), "beta"),
        ("fused_adam", "eps", -1e-8, "eps"),
        ("fused_adam", "weight_decay", -0.1, "weight_decay"),
        # Baked in.
        ("adamw", "weight_decay", 0.3, r"weight_decay.* was 0\.1 .* 0\.3.*FusedAdam"),
        ("adamw", "betas", (0.8, 0.9), r"betas.*\(0\.9, 0\.999\).*\(0\.8, 0\.9\).*FusedAdam"),
        ("adamw", "eps", 1e-4, r"eps.*1e-08.*0\.0001.*FusedAdam"),
        ("adamw", "maximize", True, r"maximize.*False.*True.*FusedAdam"),
        ("sgd", "momentum", 0.5, r"momentum.*0\.9.*0\.5.*forward_backward"),
    ],
)
def test_a_value_that_a_replay_cannot_take_is_refused_by_name(
    optimizer: str, name: str, value: object, message: str, device: torch.device
) -> None:
    step, model, optim, next_batch = make_step(device, optimizer=optimizer)
    for _ in range(6):
        step(*next_batch())
    good = optim.param_groups[0][name]
    optim.param_groups[0][name] = value
    batch = next_batch()
    before = snapshot(model, optim)
    with pytest.raises(REFUSED[optimizer != "fused_adam"], match=message):
        step(*batch)
    assert_same_state(before, snapshot(model, optim))
    optim.param_groups[0][name] = good
    step(*batch)  # the old value is fine again


def by_hand(optim: FusedAdam) -> Callable[[], object]:
    return lambda: optim.param_groups[0].update(lr=optim.param_groups[0]["lr"] * 0.5)


def stepped(
    make: Callable[..., Any], *args: Any, **options: Any
) -> Callable[[FusedAdam], Callable[[], object]]:
    """Return what steps a schedule inside the iteration, which a replay would not run."""

    def behind(optim: FusedAdam) -> Callable[[], object]:
        scheduler = make(optim, *args, **options)
        seen = [1.0] if make is lr_scheduler.ReduceLROnPlateau else []
        return lambda: scheduler.step(*seen)

    return behind


def in_sequence(optim: FusedAdam) -> lr_scheduler.SequentialLR:
    both = [lr_scheduler.ConstantLR(optim), lr_scheduler.ExponentialLR(optim, 0.9)]
    return lr_scheduler.SequentialLR(optim, both, [6])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (by_hand, "changed 'lr' of group 0 of FusedAdam from 0.00125 to 0.000625"),
        (stepped(lr_scheduler.CosineAnnealingLR, 50), "CosineAnnealingLR.step counts in Python"),
        # Has not changed anything when the iteration is recorded.
        (stepped(lr_scheduler.StepLR, 6), "StepLR.step counts in Python"),
        (stepped(in_sequence), "SequentialLR.step counts in Python"),
        (stepped(swa_utils.SWALR, 1e-3), "SWALR.step counts in Python"),
        (
            stepped(lr_scheduler.ReduceLROnPlateau, patience=0),
            "ReduceLROnPlateau.step counts in Python",
        ),
    ],
)
def test_a_learning_rate_that_is_moved_inside_the_iteration_is_refused(
    make: Callable[[FusedAdam], Callable[[], object]], words: str
) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    optim = FusedAdam(model.parameters(), lr=1e-2)
    with graphfsdp.capture(model, optim, iteration=steps_once(behind=make(optim))) as step:
        for _ in range(3):
            step(torch.ones(2, 4))
        before, lr = snapshot(model, optim), optim.param_groups[0]["lr"]
        with pytest.raises(
            graphfsdp.CaptureError, match=f"{words}.*outside the iteration"
        ) as caught:
            step(torch.ones(2, 4))
    assert_same_state(before, snapshot(model, optim))
    assert optim.param_groups[0]["lr"] == lr
    if make is not by_hand:
        assert caught.value.source is not None
        assert caught.value.source.file == __file__
