"""Hyper-parameters are data: whatever changes between replays takes effect in the next one."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, assert_same_states, snapshot
from iterations import steps_once
from make_step import make_step
from zoo import ZOO

NUM_STEPS = 14


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: matrices with weight decay, the rest without."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.2},
        {"params": [param for param in params if param.dim() < 2], "lr": 0.05},
    ]


Tick = Callable[[int], None]
Setup = Callable[[torch.optim.Optimizer], Tick]
Change = Callable[[torch.optim.Optimizer, int], None]


def train(
    scope: str, device: torch.device, setup: Setup, make: Callable[..., torch.optim.Optimizer]
) -> list[dict[str, Tensor]]:
    """Train with something that happens after each call; return the state after each call."""
    torch.manual_seed(0)
    case = ZOO["mlp"]
    model = case.make().to(device)
    optim = make(make_groups(model))
    tick = setup(optim)
    generator = torch.Generator().manual_seed(1)
    found = []
    with graphfsdp.capture(model, optim, scope=scope, max_grad_norm=0.1) as step:
        for index in range(NUM_STEPS):
            step(*case.batch(generator).to(device).args)
            tick(index)
            found.append(snapshot(model, optim))
    return found


def fused_adam(groups: Any) -> torch.optim.Optimizer:
    return FusedAdam(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)


WEIGHT = "parameter layers.0.weight"


@functools.cache
def unchanged(device: torch.device) -> Tensor:
    """Return a weight after a run in which nothing is changed."""
    return train("none", device, lambda optim: lambda index: None, fused_adam)[-1][WEIGHT]


def check(setup: Setup, device: torch.device) -> None:
    """Compare captured and eager, and with a run in which nothing is changed."""
    expected = train("none", device, setup, fused_adam)
    for scope in ("full_iteration", "forward_backward"):
        assert_same_states(expected, train(scope, device, setup, fused_adam), scope)
    assert not torch.equal(unchanged(device), expected[-1][WEIGHT]), "the change had no effect"


def each_call(change: Change) -> Setup:
    return lambda optim: lambda index: change(optim, index)


def in_both_groups(change: Callable[[int], dict[str, Any]]) -> Change:
    def apply(optim: torch.optim.Optimizer, index: int) -> None:
        for group in optim.param_groups:
            group.update(change(index))

    return apply


CHANGES: dict[str, Change] = {
    "lr": in_both_groups(lambda index: {"lr": 0.1 / (index + 1)}),
    "weight_decay": in_both_groups(lambda index: {"weight_decay": 0.1 * index}),
    "beta1": in_both_groups(lambda index: {"betas": (0.9 - 0.05 * index, 0.95)}),
    "beta2": in_both_groups(lambda index: {"betas": (0.9, 0.999 - 0.01 * index)}),
    "eps": in_both_groups(lambda index: {"eps": 10.0**-index}),
    "lr_to_zero_and_back": in_both_groups(lambda index: {"lr": 0.01 * (index % 2)}),
    "lr_as_integer": in_both_groups(lambda index: {"lr": index % 2}),
    "in_one_group": lambda optim, index: optim.param_groups[index % 2].update(lr=0.01 * index),
    "for_one_call": lambda optim, index: optim.param_groups[0].update(
        lr=0.5 if index == 9 else 0.01
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_by_hand_takes_effect_in_the_next_replay(name: str, device: torch.device) -> None:
    check(each_call(CHANGES[name]), device)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", -1.0, "lr"),
        ("betas", (1.0, 0.9), "beta"),
        ("eps", -1e-8, "eps"),
        ("weight_decay", -0.1, "weight_decay"),
    ],
)
def test_a_value_out_of_range_is_refused_before_the_replay(
    name: str, value: object, message: str, device: torch.device
) -> None:
    step, model, optim, next_batch = make_step(device)
    for _ in range(6):
        step(*next_batch())
    good = optim.param_groups[0][name]
    optim.param_groups[0][name] = value
    batch = next_batch()
    before = snapshot(model, optim)
    with pytest.raises(graphfsdp.ConfigError, match=message):
        step(*batch)
    assert_same_state(before, snapshot(model, optim))
    optim.param_groups[0][name] = good
    step(*batch)


def make_torch(name: str, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return kind(model.parameters(), lr=0.01, fused=True, capturable=device.type == "cuda")


@pytest.mark.parametrize(
    ("optimizer", "key", "value"),
    [
        ("adamw", "weight_decay", 0.3),
        ("adamw", "betas", (0.8, 0.9)),
        ("adam", "eps", 1e-4),
        ("adam", "maximize", True),
        ("sgd", "momentum", 0.5),
    ],
)
def test_a_changed_value_that_is_baked_in_is_refused_by_name(
    optimizer: str, key: str, value: object, device: torch.device
) -> None:
    torch.manual_seed(0)
    case = ZOO["mlp"]
    model = case.make().to(device)
    optim = make_torch(optimizer, model, device)
    step = graphfsdp.capture(model, optim)
    batch = case.batch(torch.Generator().manual_seed(1)).to(device).args
    for _ in range(6):
        step(*batch)
    before = snapshot(model, optim)
    old = optim.param_groups[0][key]
    optim.param_groups[0][key] = value
    with pytest.raises(graphfsdp.GuardError, match=key) as caught:
        step(*batch)
    assert repr(old) in str(caught.value)
    assert repr(value) in str(caught.value)
    assert ("forward_backward" if optimizer == "sgd" else "FusedAdam") in str(caught.value)
    assert_same_state(before, snapshot(model, optim))
    optim.param_groups[0][key] = old
    step(*batch)  # the old value is fine again


def test_baked_values_are_free_while_the_optimizer_is_eager(device: torch.device) -> None:
    def change(optim: torch.optim.Optimizer, index: int) -> None:
        optim.param_groups[0]["lr"] = 0.1 / (index + 1)
        optim.param_groups[1]["weight_decay"] = 0.1 * index

    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=0.01, foreach=True)

    eager, captured = (
        train(scope, device, each_call(change), make) for scope in ("none", "forward_backward")
    )
    assert_same_states(eager, captured)


# Schedules that are stepped inside the iteration, which a replay would not run.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "CosineAnnealingLR": lambda optim: lr_scheduler.CosineAnnealingLR(optim, 50),
    # Has not changed anything when the iteration is recorded.
    "StepLR": lambda optim: lr_scheduler.StepLR(optim, 6),
    "SequentialLR": lambda optim: lr_scheduler.SequentialLR(
        optim, [lr_scheduler.ConstantLR(optim), lr_scheduler.ExponentialLR(optim, 0.9)], [6]
    ),
    "SWALR": lambda optim: swa_utils.SWALR(optim, 1e-3),
    "ReduceLROnPlateau": lambda optim: lr_scheduler.ReduceLROnPlateau(optim, patience=0),
}


def start(
    after_step: Callable[[FusedAdam], object],
) -> tuple[graphfsdp.CapturedStep, nn.Module, FusedAdam]:
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    optim = FusedAdam(model.parameters(), lr=1e-2)

    iteration = steps_once(behind=lambda: after_step(optim))
    return graphfsdp.capture(model, optim, iteration=iteration), model, optim


def refused(step: graphfsdp.CapturedStep, model: nn.Module, optim: FusedAdam, match: str) -> Any:
    for _ in range(3):
        step(torch.ones(2, 4))
    before, lr = snapshot(model, optim), optim.param_groups[0]["lr"]
    with pytest.raises(graphfsdp.CaptureError, match=match) as caught:
        step(torch.ones(2, 4))
    assert "outside the iteration" in str(caught.value)
    assert_same_state(before, snapshot(model, optim))
    assert optim.param_groups[0]["lr"] == lr
    return caught.value


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_inside_the_iteration_is_refused(name: str) -> None:
    schedulers: list[Any] = []

    def after_step(optim: FusedAdam) -> None:
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))

    step, model, optim = start(after_step)
    schedulers.append(SCHEDULERS[name](optim))
    error = refused(step, model, optim, f"{name}.step counts in Python")
    assert error.source is not None
    assert error.source.file == __file__


def test_a_learning_rate_that_the_iteration_sets_by_hand_is_refused() -> None:
    def after_step(optim: FusedAdam) -> None:
        for group in optim.param_groups:
            group["lr"] *= 0.5

    step, model, optim = start(after_step)
    refused(step, model, optim, "changed 'lr' of group 0 of FusedAdam from 0.00125 to 0.000625")
