"""What an MLPerf-style log tells of a run's settings, key by key.

Source: mlcommons/training_policies, and the rules that mlperf_logging.compliance_checker applies
to training 6.1.0.
"""

import platform

import torch

from graphfsdp.config import ShardingStrategy
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.ranks import Ranks

Settings = dict[str, object]


def submission_settings(config: TrainConfig, ranks: Ranks, device: torch.device) -> Settings:
    """Return who has run what, on what."""
    return {
        "submission_benchmark": config.mllog_benchmark,
        "submission_org": config.mllog_org,
        "submission_platform": config.mllog_platform or _platform(ranks, device),
        "submission_division": config.mllog_division,
        "submission_status": config.mllog_status,
    }


def run_settings(config: TrainConfig, ranks: Ranks, device: torch.device) -> Settings:
    """Return what decides speed and numbers of the run."""
    batch = config.batch(ranks.size)
    kept = "preset " + config.preset if config.out is None else f"{config.out}/config.json"
    return {
        "seed": config.seed,
        "config_filename": kept,
        "global_batch_size": batch.num_sequences,
        "micro_batch_size": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.num_microbatches,
        "max_sequence_length": config.seq_length,
        "max_steps": config.train_iters,
        "eval_samples": config.eval_iters * config.micro_batch_size,
        "tensor_parallelism": 1,
        "pipeline_parallelism": 1,
        "context_parallelism": 1,
        "expert_parallelism": 1,
        **_optimizer_settings(config, batch.num_sequences),
        **_precision_settings(config, ranks, device),
    }


def _optimizer_settings(config: TrainConfig, num_sequences: int) -> Settings:
    warmup_iters = round(config.warmup_iters)
    decay_iters = (config.lr_decay_iters or config.train_iters) - warmup_iters
    if config.lr_decay_style == "WSD" and config.lr_wsd_decay_iters is not None:
        decay_iters = config.lr_wsd_decay_iters
    return {
        "opt_name": "adamw",
        "opt_base_learning_rate": config.lr,
        "opt_end_learning_rate": config.min_lr,
        "opt_learning_rate_warmup_steps": warmup_iters,
        "opt_learning_rate_warmup_samples": warmup_iters * num_sequences,
        "opt_learning_rate_decay_steps": decay_iters,
        "opt_learning_rate_decay_schedule": f"{config.lr_decay_style} with linear warmup",
        "opt_adamw_beta_1": config.adam_beta1,
        "opt_adamw_beta_2": config.adam_beta2,
        "opt_adamw_epsilon": config.adam_eps,
        "opt_adamw_weight_decay": config.weight_decay,
        "opt_gradient_clip_norm": config.clip_grad,
    }


def _precision_settings(config: TrainConfig, ranks: Ranks, device: torch.device) -> Settings:
    products = _word(config.param_dtype)
    if products == "fp32" and device.type == "cuda":
        tf32 = torch.get_float32_matmul_precision() != "highest"
        products = "tf32" if tf32 else "fp32"
    # Gradients are reduced as main grads; weights that are not kept by all travel as model weights.
    sent = {config.main_grads_dtype}
    if ranks.launched and config.sharding is not ShardingStrategy.NO_SHARD and config.bf16:
        sent.add("bf16")
    return {
        "lowest_numerical_precision_in_linear": products,
        "lowest_numerical_precision_in_attn": products,
        "lowest_numerical_precision_in_comm": "bfloat16" if "bf16" in sent else "fp32",
    }


def _word(dtype: torch.dtype) -> str:
    return "bfloat16" if dtype == torch.bfloat16 else "fp32"


def _platform(ranks: Ranks, device: torch.device) -> str:
    if device.type == "cuda":
        return f"{ranks.size}x {torch.cuda.get_device_name(device)}"
    return f"{ranks.size}x CPU ({platform.machine()})"
