"""Everything that decides a training run, frozen and validated; one field per flag."""

import math
import re
from dataclasses import dataclass, fields
from typing import Literal

import torch

from graphfsdp.config import MixedPrecisionPolicy, Scope, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.optim import ParamSchedule
from graphfsdp.training.batch import IterationBatch
from graphfsdp.training.gpt import GPTConfig, Normalization, PositionEmbeddingType

DtypeName = Literal["fp32", "bf16"]
LrDecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
LrWsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
WeightDecayIncrStyle = Literal["constant", "linear", "cosine"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
ScopeName = Literal["none", "forward_backward", "full_iteration"]
MllogDivision = Literal["closed", "open"]
MllogStatus = Literal["onprem", "cloud", "research"]


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Field ``some_name`` is the flag ``--some-name``; see its help.

    Messages name flags, since that is what a user of the trainer can change.
    """

    preset: str = "default"
    # Model.
    num_layers: int = 4
    hidden_size: int = 192
    num_attention_heads: int = 6
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    position_embedding_type: PositionEmbeddingType = "rope"
    normalization: Normalization = "RMSNorm"
    swiglu: bool = True
    untie_embeddings_and_output_weights: bool = False
    disable_bias_linear: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    rotary_base: float = 10_000.0
    vocab_size: int | None = None
    # Data and length of the run.
    seq_length: int = 256
    micro_batch_size: int = 8
    global_batch_size: int | None = None
    train_iters: int = 320
    data: str | None = None
    seed: int = 1234
    # Optimizer and schedule.
    lr: float = 3e-3
    lr_decay_style: LrDecayStyle = "cosine"
    lr_decay_iters: int | None = None
    lr_warmup_iters: int = 20
    lr_warmup_fraction: float | None = None
    lr_warmup_init: float | None = None
    lr_wsd_decay_style: LrWsdDecayStyle = "exponential"
    lr_wsd_decay_iters: int | None = None
    min_lr: float = 0.0
    weight_decay: float = 0.1
    weight_decay_incr_style: WeightDecayIncrStyle = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    overlap_cpu_optimizer_d2h_h2d: bool = True
    pin_cpu_grads: bool = False
    pin_cpu_params: bool = False
    # Precision.
    bf16: bool = False
    use_precision_aware_optimizer: bool = False
    main_params_dtype: DtypeName = "fp32"
    main_grads_dtype: DtypeName = "fp32"
    # Capture.
    cuda_graph_scope: ScopeName = "full_iteration"
    cuda_graph_warmup_steps: int = 3
    device: DeviceChoice = "auto"
    # Several processes.
    data_parallel_sharding_strategy: str = "no_shard"
    num_distributed_optimizer_instances: int = 1
    outer_dp_sharding_strategy: str = "no_shard"
    init_model_with_meta_device: bool = False
    distributed_timeout_minutes: int = 10
    # Checkpoints.
    save: str | None = None
    load: str | None = None
    save_interval: int = 0
    async_save: bool = False
    keep_last: int | None = None
    # What is seen of it.
    log_interval: int = 10
    eval_interval: int = 80
    eval_iters: int = 10
    sample_tokens: int = 200
    out: str | None = None
    no_progress: bool = False
    # A log in the style of MLPerf.
    target_loss: float | None = None
    mllog: str | None = None
    mllog_benchmark: str = "graphfsdp_gpt"
    mllog_org: str = "unverified"
    mllog_platform: str | None = None
    mllog_division: MllogDivision = "closed"
    mllog_status: MllogStatus = "research"
    mllog_cache_cleared: bool = False

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

    def gpt(self, vocab_size: int) -> GPTConfig:
        """Return the model's shape.

        Raises:
            ConfigError: there is no such model.
        """
        shared = {field.name for field in fields(GPTConfig)} & {
            field.name for field in fields(self)
        }
        values = {name: getattr(self, name) for name in shared - {"vocab_size"}}
        return GPTConfig(vocab_size=vocab_size, **values)

    @property
    def scope(self) -> Scope:
        """How much of an iteration is in the graph."""
        return Scope.parse(self.cuda_graph_scope)

    @property
    def sharding(self) -> ShardingStrategy:
        """What is cut into one part per rank."""
        return ShardingStrategy.parse(self.data_parallel_sharding_strategy)

    def batch(self, num_ranks: int) -> IterationBatch:
        """Return how an iteration's batch is cut over that many ranks.

        Raises:
            ConfigError: it cannot be cut into equal parts.
        """
        together = self.micro_batch_size * num_ranks
        num_sequences = self.global_batch_size or together
        if num_sequences % together:
            divisor = f"--micro-batch-size {self.micro_batch_size}"
            if num_ranks > 1:
                divisor += f" x {num_ranks} ranks = {together}"
            raise ConfigError(
                f"--global-batch-size {num_sequences} is not divisible by {divisor}: every rank "
                f"runs the same whole number of micro-batches; make it a multiple"
            )
        return IterationBatch(
            micro_batch_size=self.micro_batch_size,
            num_microbatches=num_sequences // together,
            num_ranks=num_ranks,
            seq_length=self.seq_length,
        )

    @property
    def warmup_iters(self) -> float:
        """Iterations over which the learning rate first rises."""
        if self.lr_warmup_fraction is None:
            return self.lr_warmup_iters
        return self.lr_warmup_fraction * (self.lr_decay_iters or self.train_iters)

    @property
    def schedule(self) -> ParamSchedule:
        """How learning rate and weight decay go.

        Raises:
            ConfigError: they cannot go so.
        """
        return ParamSchedule(
            lr_decay_iters=self.lr_decay_iters or self.train_iters,
            lr_decay_style=self.lr_decay_style,
            # A fraction that was given counts more than a preset's number.
            lr_warmup_iters=0 if self.lr_warmup_fraction is not None else self.lr_warmup_iters,
            lr_warmup_fraction=self.lr_warmup_fraction,
            lr_warmup_init=self.lr_warmup_init,
            min_lr=self.min_lr,
            lr_wsd_decay_style=self.lr_wsd_decay_style,
            lr_wsd_decay_iters=self.lr_wsd_decay_iters,
            weight_decay_incr_style=self.weight_decay_incr_style,
            start_weight_decay=self.start_weight_decay,
            end_weight_decay=self.end_weight_decay,
            weight_decay_incr_iters=self.train_iters,
        )

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the model weights, in which forward and backward compute."""
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def main_dtype(self) -> torch.dtype:
        """Dtype of the weights that the optimizer updates."""
        return _dtype(self.main_params_dtype) if self.bf16 else torch.float32

    @property
    def master_weights(self) -> bool:
        """Float32 main weights are kept beside narrower model weights.

        By the optimizer where nothing is sharded; a sharded model holds the main weights itself.
        """
        return self.bf16 and self.main_params_dtype == "fp32"

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """Which dtype each copy of a weight and of its gradient has."""
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            main_params_dtype=_dtype(self.main_params_dtype),
            main_grads_dtype=_dtype(self.main_grads_dtype),
            use_decoupled_grad=self.use_precision_aware_optimizer,
        )


def _dtype(name: DtypeName) -> torch.dtype:
    return torch.bfloat16 if name == "bf16" else torch.float32


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _in_flags(message: str) -> str:
    """Spell fields of the model's shape and of the schedule as the flags that set them."""
    for field in (*fields(GPTConfig), *fields(ParamSchedule)):
        message = re.sub(rf"\b{field.name}\b", _flag(field.name), message)
    return message


__all__ = [
    "DeviceChoice",
    "DtypeName",
    "LrDecayStyle",
    "LrWsdDecayStyle",
    "MllogDivision",
    "MllogStatus",
    "ScopeName",
    "TrainConfig",
    "WeightDecayIncrStyle",
]
