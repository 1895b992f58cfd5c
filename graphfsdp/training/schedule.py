"""Learning rate and weight decay of each iteration of a run."""

import torch

from graphfsdp.optim import ParamScheduler
from graphfsdp.training.config import TrainConfig


def learning_rate(config: TrainConfig, iteration: int) -> float:
    """Return the rate of an iteration, counted from 0: linear warm-up, then decay.

    The numbers are Megatron's, but that each iteration of the warm-up has the rate of Megatron's
    next one unless ``--lr-warmup-init`` is given: there the first iteration has a rate of 0.
    """
    return config.schedule.learning_rate(iteration, config.lr)


def make_scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer) -> ParamScheduler:
    """Return a scheduler that sets the optimizer's rate and weight decay."""
    return ParamScheduler(optimizer, config.schedule)
