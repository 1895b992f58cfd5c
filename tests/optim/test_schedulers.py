"""Every scheduler of torch drives our optimizers, in replays as eagerly."""

import inspect
from collections.abc import Callable
from functools import partial
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, check_against_eager
from zoo_models import WIDTH, mlp

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
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=20, power=2.0),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
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
def test_a_replay_follows_the_scheduler(device: torch.device, name: str) -> None:
    def make(params: list[nn.Parameter]) -> FusedAdam:
        return FusedAdam(params, lr=0.1, weight_decay=0.5)

    def start(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        return partial(advance, SCHEDULERS[name](optimizer))

    case = Case(mlp, lambda g: Batch((torch.randn(2, WIDTH, generator=g),)), setup=start)
    check_against_eager(case, device, optimizer=make)
