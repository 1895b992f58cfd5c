"""A captured step over a model of the zoo."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import graphfsdp
from graphfsdp import CapturedStep
from helpers import make_optimizer
from zoo import ZOO


def make_step(
    device: torch.device, name: str = "mlp", optimizer: str = "fused_adam", **options: Any
) -> tuple[CapturedStep, nn.Module, torch.optim.Optimizer, Callable[[], tuple[Any, ...]]]:
    case = ZOO[name]
    torch.manual_seed(3)
    model = case.make().to(device)
    optim = make_optimizer(optimizer, model.parameters(), device)
    options.setdefault("loss_fn", case.loss_fn)
    step = graphfsdp.capture(model, optim, **options)
    generator = torch.Generator().manual_seed(4)
    return step, model, optim, lambda: case.batch(generator).to(device).args
