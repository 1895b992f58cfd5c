"""Learning rate and weight decay over a run, in Megatron's terms, for any optimizer of torch."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from graphfsdp.errors import ConfigError

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
LR_WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WEIGHT_DECAY_INCR_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class ParamSchedule:
    """How learning rate and weight decay go over a run; fields are named as Megatron's flags.

    Attributes:
        lr_decay_iters: The decay ends there; later iterations have ``min_lr``. A run's length.
        lr_decay_style: "constant", "linear", "cosine", "inverse-square-root" or "WSD" (warm-up,
            stable, decay).
        lr_warmup_iters: The rate rises linearly until this iteration.
        lr_warmup_fraction: The same as a share of ``lr_decay_iters``.
        lr_warmup_init: Rate of the first iteration of a warm-up. With None each iteration of it
            has the rate that the next one has with 0, so that the first one is not lost.
        min_lr: Smallest rate.
        lr_wsd_decay_style: "exponential", "linear", "cosine" or "minus_sqrt", for WSD.
        lr_wsd_decay_iters: Length of WSD's decay, at the end.
        weight_decay_incr_style: "constant" leaves the weight decay of the groups alone; "linear"
            and "cosine" go from ``start_weight_decay`` to ``end_weight_decay``.
        start_weight_decay: Weight decay of the first iteration.
        end_weight_decay: Weight decay at the end, no smaller.
        weight_decay_incr_iters: Iterations between the two; ``lr_decay_iters`` if not given.

    Raises:
        ConfigError: a number is out of its range, or two settings clash.
    """

    lr_decay_iters: int
    lr_decay_style: str = "linear"
    lr_warmup_iters: int = 0
    lr_warmup_fraction: float | None = None
    lr_warmup_init: float | None = 0.0
    min_lr: float = 0.0
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_iters: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_iters: int | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("lr_decay_style", LR_DECAY_STYLES),
            ("lr_wsd_decay_style", LR_WSD_DECAY_STYLES),
            ("weight_decay_incr_style", WEIGHT_DECAY_INCR_STYLES),
        ):
            if getattr(self, name) not in known:
                raise _refusal(name, f"one of {', '.join(known)}", getattr(self, name))
        if not self.lr_decay_iters >= 1:
            raise _refusal("lr_decay_iters", "at least 1", self.lr_decay_iters)
        self._check_warmup()
        if self.lr_decay_style == "WSD":
            longest = math.floor(self.lr_decay_iters - self.warmup)
            if self.lr_wsd_decay_iters is None or not 1 <= self.lr_wsd_decay_iters <= longest:
                raise ConfigError(
                    "lr_decay_style='WSD' decays in the last lr_wsd_decay_iters iterations; "
                    f"expected 1 to {longest}, what the warm-up leaves of lr_decay_iters, got "
                    f"{self.lr_wsd_decay_iters}"
                )
        self._check_weight_decay()

    def _check_warmup(self) -> None:
        for name, value in (("lr_warmup_init", self.lr_warmup_init), ("min_lr", self.min_lr)):
            if value is not None and not 0 <= value < math.inf:
                raise _refusal(name, "at least 0 and finite", value)
        if self.lr_warmup_fraction is not None:
            if self.lr_warmup_iters:
                raise _refusal(
                    "lr_warmup_fraction",
                    f"left out beside lr_warmup_iters={self.lr_warmup_iters}",
                    self.lr_warmup_fraction,
                )
            if not 0 <= self.lr_warmup_fraction < 1:
                raise _refusal("lr_warmup_fraction", "in [0, 1)", self.lr_warmup_fraction)
        if not 0 <= self.lr_warmup_iters < self.lr_decay_iters:
            raise _refusal(
                "lr_warmup_iters", f"in [0, lr_decay_iters={self.lr_decay_iters})",
                self.lr_warmup_iters,
            )  # fmt: skip

    def _check_weight_decay(self) -> None:
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            if start is not None or end is not None:
                raise ConfigError(
                    "weight_decay_incr_style='constant' leaves each group's weight_decay as it "
                    f"is, but start_weight_decay={start} and end_weight_decay={end} were given. "
                    "Remedy: leave them out, or style 'linear' or 'cosine'"
                )
        elif start is None or end is None or not 0 <= start <= end < math.inf:
            raise ConfigError(
                f"weight_decay_incr_style={self.weight_decay_incr_style!r} needs 0 <= "
                f"start_weight_decay <= end_weight_decay, got {start} and {end}"
            )
        incr_iters = self.weight_decay_incr_iters
        if incr_iters is not None and not incr_iters >= 1:
            raise _refusal("weight_decay_incr_iters", "at least 1", incr_iters)

    @property
    def warmup(self) -> float:
        """Length of the warm-up in iterations; with a fraction, maybe no whole number."""
        if self.lr_warmup_fraction is not None:
            return self.lr_warmup_fraction * self.lr_decay_iters
        return self.lr_warmup_iters

    def learning_rate(self, iteration: int, max_lr: float, min_lr: float | None = None) -> float:
        """Return the rate of an iteration.

        Args:
            iteration: Counted from 0.
            max_lr: The highest rate.
            min_lr: The smallest one, if not the schedule's.

        Source: Megatron-LM, ``OptimizerParamScheduler.get_lr``; WSD: Hu et al. 2024
            (arXiv:2404.06395).
        """
        low = self.min_lr if min_lr is None else min_lr
        if self.warmup > 0 and iteration <= self.warmup:
            if self.lr_warmup_init is None:
                return max_lr * min(1.0, (iteration + 1) / float(self.warmup))
            rise = (max_lr - self.lr_warmup_init) * float(iteration)
            return self.lr_warmup_init + rise / float(self.warmup)
        if self.lr_decay_style == "constant":
            return max_lr
        if iteration > self.lr_decay_iters:
            return low
        if self.lr_decay_style == "inverse-square-root":
            roots = math.pow(max(self.warmup, 1), 0.5), math.pow(max(iteration, 1), 0.5)
            return max(low, max_lr * roots[0] / roots[1])
        return low + self._remaining(iteration) * (max_lr - low)

    def _remaining(self, iteration: int) -> float:
        """Return the share of the way down that is left, after the warm-up."""
        style, begin = self.lr_decay_style, self.warmup
        if style == "WSD":
            assert self.lr_wsd_decay_iters is not None
            style, begin = self.lr_wsd_decay_style, self.lr_decay_iters - self.lr_wsd_decay_iters
        progress = max(0.0, float(iteration - begin) / float(self.lr_decay_iters - begin))
        remaining: dict[str, float] = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (math.cos(math.pi * progress) + 1.0),
            "exponential": 2.0 * math.pow(0.5, progress) - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(progress),
        }
        return remaining[style]

    def weight_decay(self, iteration: int, start: float, end: float) -> float:
        """Return the weight decay of an iteration, counted from 0.

        Source: Megatron-LM, ``OptimizerParamScheduler.get_wd``.
        """
        incr_iters = self.weight_decay_incr_iters or self.lr_decay_iters
        if iteration > incr_iters or self.weight_decay_incr_style == "constant":
            return end
        share = float(iteration) / float(incr_iters)
        if self.weight_decay_incr_style == "cosine":
            share = 0.5 * (math.cos(math.pi * (1 - share)) + 1.0)
        return start + share * (end - start)


class ParamScheduler(LRScheduler):
    """Sets lr and weight decay of every group as a ``ParamSchedule`` says.

    Call ``step`` after each iteration. A group's lr, when the scheduler is made, is its highest.
    As in Megatron, a group may have its own ``max_lr``, ``min_lr``, ``start_wd``, ``end_wd`` and
    ``wd_mult``; a weight decay of 0 means a ``wd_mult`` of 0, so that groups that do not decay
    never begin to.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ParamSchedule) -> None:
        """Set the numbers of the first iteration.

        Args:
            optimizer: Any; those of graphfsdp read all numbers anew in each replay.
            schedule: How the numbers go.

        Raises:
            ConfigError: a group's highest rate is below its smallest.
        """
        self.schedule = schedule
        self._wd_mults = [
            1.0 if group.get("weight_decay", 0.0) else 0.0 for group in optimizer.param_groups
        ]
        for row, group in enumerate(optimizer.param_groups):
            high = float(group.get("max_lr", group.get("initial_lr", group["lr"])))
            low = group.get("min_lr", schedule.min_lr)
            if not max(low, schedule.lr_warmup_init or 0.0) <= high:
                raise ConfigError(
                    f"the highest rate of parameter group {row} is {high}; expected at least "
                    f"min_lr={low} and lr_warmup_init={schedule.lr_warmup_init}"
                )
        super().__init__(optimizer)
        # Host numbers, so that a step reads no device.
        self.base_lrs = [float(lr) for lr in self.base_lrs]

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group in the iteration to come."""
        return [
            self.schedule.learning_rate(
                self.last_epoch, float(group.get("max_lr", base)), group.get("min_lr")
            )
            for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True)
        ]

    def step(self, epoch: int | None = None) -> None:
        """Go on to the next iteration.

        Args:
            epoch: Deprecated by torch; the iteration to go to.
        """
        super().step(epoch)
        self._apply_weight_decay()

    def apply(self) -> None:
        """Set the numbers of the iteration to come again, after a load has changed them."""
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = self.get_lr()
        self._apply_weight_decay()

    def _apply_weight_decay(self) -> None:
        for group, mult in zip(self.optimizer.param_groups, self._wd_mults, strict=True):
            start = group.get("start_wd", self.schedule.start_weight_decay)
            end = group.get("end_wd", self.schedule.end_weight_decay)
            if start is not None and end is not None:
                decay = self.schedule.weight_decay(self.last_epoch, start, end)
                group["weight_decay"] = decay * group.get("wd_mult", mult)

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands; how it goes is the constructor's to say."""
        own = ("schedule", "_wd_mults")
        return {key: value for key, value in super().state_dict().items() if key not in own}


def _refusal(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"{name} must be {expected}, got {got!r}")
