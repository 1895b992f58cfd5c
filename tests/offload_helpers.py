"""Optimizers for the tests of offloaded state."""

from collections.abc import Callable

import torch

from graphfsdp.optim import FusedAdam, FusedLion, FusedSGD
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer

SHAPES = [(20, 10), (10,), (3, 4, 5), (0, 4), (), (12, 40)]
NARROW = torch.bfloat16
Make = Callable[..., DeviceOptimizer]
KINDS: dict[str, tuple[torch.dtype, Make]] = {
    "adam": (torch.float32, FusedAdam),
    "bf16": (NARROW, lambda p: FusedAdam(p, master_weights=True)),
    "remainders": (
        NARROW,
        lambda p: FusedAdam(p, master_weights=True, store_param_remainders=True),
    ),
    "fp8": (
        torch.float32,
        lambda p: FusedAdam(p, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16),
    ),
    "sgd": (torch.float32, lambda p: FusedSGD(p, momentum=0.9)),
    "lion": (NARROW, lambda p: FusedLion(p, master_weights=True)),
}
