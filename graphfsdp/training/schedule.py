"""The learning rate of each iteration, for torch's own scheduler."""

import math

import torch

from graphfsdp.training.config import TrainConfig


def learning_rate(config: TrainConfig, iteration: int) -> float:
    """Return the rate of an iteration, counted from 0: linear warm-up, then decay.

    The last iteration of the run trains at nearly ``min_lr``; later ones stay at it.
    """
    if iteration < config.lr_warmup_iters:
        return config.lr * (iteration + 1) / config.lr_warmup_iters
    decay_iters = config.train_iters - config.lr_warmup_iters
    progress = min((iteration - config.lr_warmup_iters) / decay_iters, 1.0)
    remaining = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.lr_decay_style]
    return config.min_lr + (config.lr - config.min_lr) * remaining


def make_scheduler(
    config: TrainConfig, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a scheduler that sets the optimizer's rate to ``learning_rate``."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda iteration: learning_rate(config, iteration) / config.lr
    )


__all__ = ["learning_rate", "make_scheduler"]
