"""Metrics for other programs to show: TensorBoard's files, and Weights & Biases."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from graphfsdp.errors import ConfigError
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.metrics import Metrics

Sink = Callable[[Metrics], object]


def open_sinks(
    config: TrainConfig, facts: Mapping[str, object], start: int, stack: ExitStack
) -> list[Sink]:
    """Return what takes each logged step; the stack closes it.

    Of a run that goes on, what TensorBoard has of steps behind ``start`` is no longer shown.
    """
    sinks: list[Sink] = []
    try:
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            writer: Any = SummaryWriter(f"{config.out}/tensorboard", purge_step=start + 1)
            stack.callback(writer.close)
            sinks.append(lambda metrics: _write(writer, metrics))
        if config.wandb is not None:
            import wandb

            run = stack.enter_context(wandb.init(project=config.wandb, config=dict(facts)))
            sinks.append(lambda metrics: run.log(_numbers(metrics), step=metrics.step))
    except ImportError as error:
        raise ConfigError(
            f"--tensorboard and --wandb need the packages of these names ({error}): pip install "
            '"graphfsdp[tensorboard,wandb]", or leave them out'
        ) from None
    return sinks


def _write(writer: Any, metrics: Metrics) -> None:
    for name, value in _numbers(metrics).items():
        writer.add_scalar(name, value, metrics.step)


def _numbers(metrics: Metrics) -> dict[str, float]:
    found = dataclasses.asdict(metrics)
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
