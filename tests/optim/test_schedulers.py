"""Every scheduler of torch drives our optimizers as it drives torch's, eagerly and in replays."""

import inspect
from collections.abc import Callable
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import graphfsdp
from adam_helpers import copies_of, make_params, set_grads
from graphfsdp.optim import FusedAdam, FusedSGD

Make = Callable[[torch.optim.Optimizer], LRScheduler]

SCHEDULERS: MappingProxyType[str, Make] = MappingProxyType(
    {
        "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
        "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
        "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=4),
        "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
        "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2.0),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
        "SequentialLR": lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)],
            [3],
        ),
        "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.5, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    }
)
NUM_STEPS = 10


def advance(scheduler: LRScheduler) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)  # a loss that does not fall
    else:
        scheduler.step()


def test_every_scheduler_of_torch_is_here() -> None:
    classes = {
        name
        for name in lr_scheduler.__all__
        if inspect.isclass(getattr(lr_scheduler, name)) and name != "LRScheduler"
    }
    assert classes == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_scheduler_drives_it_as_it_drives_torch(name: str, tensor_lr: bool, kind: str) -> None:
    params = make_params()
    twins = copies_of(params)

    def lr() -> torch.Tensor | float:
        return torch.tensor(0.1) if tensor_lr else 0.1

    ours: torch.optim.Optimizer
    theirs: torch.optim.Optimizer
    if kind == "adam":
        ours = FusedAdam(params, lr=lr())
        theirs = torch.optim.AdamW(twins, lr=lr(), weight_decay=0, fused=True)
    else:
        ours = FusedSGD(params, lr=lr(), momentum=0.9)
        theirs = torch.optim.SGD(twins, lr=lr(), momentum=0.9)
    schedulers = [SCHEDULERS[name](ours), SCHEDULERS[name](theirs)]
    rates = set()
    for _ in range(NUM_STEPS):
        set_grads(params, twins)
        ours.step()
        theirs.step()
        for scheduler in schedulers:
            advance(scheduler)
        rates.add(float(ours.param_groups[0]["lr"]))
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert len(rates) > 1
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-5)


def train(name: str, scope: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    found = []
    with graphfsdp.capture(
        model, optimizer, scope=scope, loss_fn=lambda m, x: m(x).square().mean()
    ) as step:
        for _ in range(NUM_STEPS + 4):
            step(torch.randn(2, 4))
            advance(scheduler)
            found.append(model.weight.detach().clone())
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_replay_follows_the_scheduler(name: str) -> None:
    for eager, replayed in zip(train(name, "none"), train(name, "full_iteration"), strict=True):
        assert torch.equal(eager, replayed)
