"""The learning rate over a run, in the words of Megatron's flags and with its numbers."""

import math
from dataclasses import dataclass

from graphfsdp.errors import ConfigError


@dataclass(frozen=True)
class LrSchedule:
    """Warm-up, then decay.

    Attributes:
        style: "constant", "linear", "cosine", "inverse-square-root" or "WSD" (warm-up, stable,
            decay).
        max_lr: The rate after the warm-up.
        min_lr: The rate from ``decay_iters`` on.
        warmup: Iterations over which the rate rises linearly; of a fraction, maybe no whole number.
        warmup_init: Rate of the first iteration of a warm-up. With None each iteration of it has
            the rate that the next one has with 0, so that the first one is not lost.
        decay_iters: The decay ends there.
        wsd_style: "exponential", "linear", "cosine" or "minus_sqrt", for WSD.
        wsd_iters: Length of WSD's decay, at the end.
    """

    style: str
    max_lr: float
    min_lr: float
    warmup: float
    warmup_init: float | None
    decay_iters: int
    wsd_style: str = "exponential"
    wsd_iters: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.decay_iters:
            raise ConfigError(
                f"--lr-warmup-iters must be in [0, --lr-decay-iters {self.decay_iters}), got "
                f"{self.warmup:g}"
            )
        longest = math.floor(self.decay_iters - self.warmup)
        if self.style == "WSD" and not 1 <= (self.wsd_iters or 0) <= longest:
            raise ConfigError(
                "--lr-decay-style WSD decays in the last --lr-wsd-decay-iters iterations; expected "
                f"1 to {longest}, what the warm-up leaves of --lr-decay-iters, got {self.wsd_iters}"
            )

    def rate(self, iteration: int) -> float:
        """Return the rate of an iteration, counted from 0.

        Source: Megatron-LM, ``OptimizerParamScheduler.get_lr``; WSD: Hu et al. 2024
            (arXiv:2404.06395).
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
        return self.min_lr + self._remaining(iteration) * (self.max_lr - self.min_lr)

    def _remaining(self, iteration: int) -> float:
        """Return the share of the way down that is left, after the warm-up."""
        style, begin = self.style, self.warmup
        if style == "WSD":
            assert self.wsd_iters is not None
            style, begin = self.wsd_style, self.decay_iters - self.wsd_iters
        progress = max(0.0, float(iteration - begin) / float(self.decay_iters - begin))
        remaining: dict[str, float] = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (math.cos(math.pi * progress) + 1.0),
            "exponential": 2.0 * math.pow(0.5, progress) - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(progress),
        }
        return remaining[style]
