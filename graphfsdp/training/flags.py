"""The flags of a training run, and what follows from them; one field per flag."""

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
class TrainFlags:
    """What the flags say. Field ``some_name`` is the flag ``--some-name``; see its help."""

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
