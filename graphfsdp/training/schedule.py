"""The learning rate of each iteration, for torch's own scheduler."""

import math

import torch

from graphfsdp.training.config import TrainConfig


def learning_rate(config: TrainConfig, iteration: int) -> float:
    """Return the rate of an iteration, counted from 0: linear warm-up, then decay.

    With the style WSD (warm-up, stable, decay) the rate stays at its height until the last
    ``lr_wsd_decay_iters`` iterations of the run, and then decays as ``lr_wsd_decay_style`` says.

    The last iteration of the run trains at nearly ``min_lr``; later ones stay at it.
    """
    if iteration < config.lr_warmup_iters:
        return config.lr * (iteration + 1) / config.lr_warmup_iters
    style: str = config.lr_decay_style
    decay_iters = config.train_iters - config.lr_warmup_iters
    if style == "WSD" and config.lr_wsd_decay_iters is not None:
        style, decay_iters = config.lr_wsd_decay_style, config.lr_wsd_decay_iters
    progress = (iteration - (config.train_iters - decay_iters)) / decay_iters
    remaining = _remaining(style, min(max(progress, 0.0), 1.0))
    return config.min_lr + (config.lr - config.min_lr) * remaining


def _remaining(style: str, progress: float) -> float:
    """Return the share of the way to ``min_lr`` that is left.

    Source: Megatron-LM, ``OptimizerParamScheduler.get_lr``; WSD: Hu et al. 2024 (arXiv:2404.06395).
    """
    remaining: dict[str, float] = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "exponential": 2.0 * 0.5**progress - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(progress),
    }
    return remaining[style]


def make_scheduler(
    config: TrainConfig, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a scheduler that sets the optimizer's rate to ``learning_rate``."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda iteration: learning_rate(config, iteration) / config.lr
    )


__all__ = ["learning_rate", "make_scheduler"]
