"""Everything that decides a training run, frozen and validated."""

import math
import re
from dataclasses import dataclass, fields

from graphfsdp.config import Scope, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.optim import ParamSchedule
from graphfsdp.training.flags import TrainFlags
from graphfsdp.training.gpt import GPTConfig


@dataclass(frozen=True)
class TrainConfig(TrainFlags):
    """A training run whose flags fit together.

    Messages name flags, since that is what a user of the trainer can change.
    """

    def __post_init__(self) -> None:
        self._check_model()
        self._check_counts()
        self._check_schedule()
        self._check_offload()
        self._check_precision()
        self._check_sharding()
        self._check_checkpoints()
        self._check_mllog()

    def _check_model(self) -> None:
        try:
            self.gpt(self.vocab_size if self.vocab_size is not None else 256)
        except ConfigError as error:
            raise ConfigError(_in_flags(str(error))) from None

    def _check_counts(self) -> None:
        for name in ("micro_batch_size", "train_iters", "log_interval", "eval_iters"):
            self._at_least(name, 1)
        for name in ("seed", "lr_warmup_iters", "eval_interval", "sample_tokens"):
            self._at_least(name, 0)
        self._at_least("cuda_graph_warmup_steps", 1 if self.scope is Scope.FULL_ITERATION else 0)
        if self.global_batch_size is not None:
            self._at_least("global_batch_size", 1)
            self.batch(num_ranks=1)

    def _check_schedule(self) -> None:
        self._in_range("lr", self.lr > 0, "greater than 0")
        self._in_range("min_lr", 0 <= self.min_lr <= self.lr, f"in [0, --lr {self.lr}]")
        self._in_range("weight_decay", self.weight_decay >= 0, "at least 0")
        self._in_range("adam_beta1", 0 <= self.adam_beta1 < 1, "in [0, 1)")
        self._in_range("adam_beta2", 0 <= self.adam_beta2 < 1, "in [0, 1)")
        self._in_range("adam_eps", self.adam_eps >= 0, "at least 0")
        self._in_range("clip_grad", self.clip_grad >= 0, "at least 0 (0 turns clipping off)")
        if self.lr_warmup_init is not None:
            in_range = 0 <= self.lr_warmup_init <= self.lr
            self._in_range("lr_warmup_init", in_range, f"in [0, --lr {self.lr}]")
        if self.lr_decay_iters is not None:
            self._at_least("lr_decay_iters", 1)
        if self.warmup_iters >= self.train_iters and self.warmup_iters > 0:
            raise ConfigError(
                f"--lr-warmup-iters {self.warmup_iters:g} leaves nothing of --train-iters "
                f"{self.train_iters} to train at the full rate; give fewer warm-up iterations"
            )
        try:
            _ = self.schedule
        except ConfigError as error:
            raise ConfigError(_in_flags(str(error))) from None

    def _check_offload(self) -> None:
        fraction = self.optimizer_offload_fraction
        self._in_range("optimizer_offload_fraction", 0 <= fraction <= 1, "in [0, 1]")
        if self.optimizer_cpu_offload and self.scope is Scope.FULL_ITERATION:
            raise ConfigError(
                "--optimizer-cpu-offload steps on the CPU, which waits for the gradients, so that "
                "the optimizer cannot be in the graph; add --cuda-graph-scope forward_backward"
            )
        for name in ("pin_cpu_grads", "pin_cpu_params"):
            if getattr(self, name) and not self.optimizer_cpu_offload:
                raise ConfigError(f"{_flag(name)} needs --optimizer-cpu-offload")

    def _check_precision(self) -> None:
        if self.main_params_dtype == "bf16" and not self.bf16:
            raise ConfigError(
                "--main-params-dtype bf16 asks for main weights that are narrower than the "
                "float32 model weights; add --bf16, or leave --main-params-dtype at fp32"
            )

    def _check_sharding(self) -> None:
        self._at_least("distributed_timeout_minutes", 1)
        self._at_least("num_distributed_optimizer_instances", 1)
        for name in ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy"):
            try:
                ShardingStrategy.parse(getattr(self, name))
            except ConfigError as error:
                raise ConfigError(f"{_flag(name)}: {error}") from None

    def _check_checkpoints(self) -> None:
        self._at_least("save_interval", 0)
        if self.keep_last is not None:
            self._at_least("keep_last", 1)
        for name in ("save_interval", "async_save", "keep_last"):
            if getattr(self, name) and self.save is None:
                raise ConfigError(f"{_flag(name)} needs --save DIR, which says where to")

    def _check_mllog(self) -> None:
        if self.target_loss is not None:
            self._in_range("target_loss", self.target_loss > 0, "greater than 0")
        if self.mllog is not None and self.load is not None:
            raise ConfigError(
                "--mllog times a run from its first iteration, and --load goes on with another "
                "one; give one of them"
            )

    def _at_least(self, name: str, minimum: int) -> None:
        self._in_range(name, getattr(self, name) >= minimum, f"at least {minimum}")

    def _in_range(self, name: str, holds: bool, expected: str) -> None:
        value = getattr(self, name)
        if not holds or not math.isfinite(value):
            raise ConfigError(f"{_flag(name)} must be {expected}, got {value}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _in_flags(message: str) -> str:
    """Spell fields of the model's shape and of the schedule as the flags that set them."""
    for field in (*fields(GPTConfig), *fields(ParamSchedule)):
        message = re.sub(rf"\b{field.name}\b", _flag(field.name), message)
    return message
