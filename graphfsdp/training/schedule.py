"""The learning rate over a run, in the words of Megatron's flags and with its numbers."""

import math
from dataclasses import dataclass

from graphfsdp.errors import ConfigError


@dataclass(frozen=True)
class LrSchedule:
    """Warm-up, then decay.

    Attributes:
        style: "constant", "linear", "cosine" or "inverse-square-root".
        max_lr: The rate after the warm-up.
        min_lr: The rate from ``decay_iters`` on.
        warmup: Iterations over which the rate rises linearly.
        warmup_init: Rate of the first iteration of a warm-up. With None each iteration of it has
            the rate that the next one has with 0, so that the first one is not lost.
        decay_iters: The decay ends there.
    """

    style: str
    max_lr: float
    min_lr: float
    warmup: float
    warmup_init: float | None
    decay_iters: int

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.decay_iters:
            raise ConfigError(
                f"--lr-warmup-iters must be in [0, --lr-decay-iters {self.decay_iters}), got "
                f"{self.warmup:g}"
            )

    def rate(self, iteration: int) -> float:
        """Return the rate of an iteration, counted from 0.

        Source: Megatron-LM, ``OptimizerParamScheduler.get_lr``.
        """
        if self.warmup > 0 and iteration <= self.warmup:
            if self.warmup_init is None:
                return self.max_lr * min(1.0, (iteration + 1) / float(self.warmup))
            rise = (self.max_lr - self.warmup_init) * float(iteration)
            return self.warmup_init + rise / float(self.warmup)
        if self.style == "constant":
            return self.max_lr
        if iteration > self.decay_iters:
            return self.min_lr
        if self.style == "inverse-square-root":
            roots = math.pow(max(self.warmup, 1), 0.5), math.pow(max(iteration, 1), 0.5)
            return max(self.min_lr, self.max_lr * roots[0] / roots[1])
        progress = float(iteration - self.warmup) / float(self.decay_iters - self.warmup)
        left = 1.0 - progress
        if self.style == "cosine":
            left = 0.5 * (math.cos(math.pi * progress) + 1.0)
        return self.min_lr + left * (self.max_lr - self.min_lr)
