"""What a training run says of itself, before and after its log lines."""

import platform
from collections.abc import Iterator

import torch

import graphfsdp
from graphfsdp.training.build import TrainingRun
from graphfsdp.training.config import TrainConfig


def banner(run: TrainingRun) -> Iterator[str]:
    yield f"graphfsdp train, preset {run.config.preset}"
    for label, fact in _facts(run):
        yield f"  {label:<10} {fact}"
    if run.config.out is None:
        yield "nothing of this run is kept; --out DIR keeps metrics and parameters"


def summary(run: TrainingRun, validation_loss: float) -> str:
    return f"validation loss {validation_loss:.4f} nats per token\n{run.step.report()}"


def _facts(run: TrainingRun) -> list[tuple[str, str]]:
    config, corpus, model = run.config, run.corpus, run.model
    num_params = sum(param.numel() for param in model.parameters())
    precision = f"{'bf16' if config.bf16 else 'fp32'} model weights, fp32 main weights and grads"
    batch = f"{run.batch.num_sequences} x {config.seq_length} tokens"
    if run.batch.num_microbatches > 1:
        batch += f" in {run.batch.num_microbatches} micro-batches"
    if run.batch.num_ranks > 1:
        batch += f" on each of {run.batch.num_ranks} ranks"
    shape = f"{config.num_layers} layers, width {config.hidden_size}, "
    shape += f"{config.num_attention_heads} heads, vocabulary {model.config.vocab_size}"
    scope: str = config.cuda_graph_scope
    if scope != "none" and config.compile != "off":
        scope += f", compiled ({config.compile})"
    versions = f"graphfsdp {graphfsdp.__version__}, torch {torch.__version__}, Python "
    device = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    if run.device.type == "cuda":
        device = f"{torch.cuda.get_device_name(run.device)}, CUDA {torch.version.cuda}"
    return [
        ("versions", versions + platform.python_version()),
        ("device", device),
        ("model", f"{num_params:,} parameters ({shape})"),
        ("precision", precision),
        ("scope", scope),
        ("iteration", f"{run.batch.num_tokens:,} tokens ({batch})"),
        *_describe_ranks(run),
        ("data", corpus.name),
        ("", f"{len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out"),
    ]


def _describe_ranks(run: TrainingRun) -> list[tuple[str, str]]:
    strategy: str = run.config.data_parallel_sharding_strategy
    if not run.ranks.launched:
        if strategy == TrainConfig().data_parallel_sharding_strategy:
            return []
        return [("sharding", f"{strategy} is ignored in a single process; torchrun starts several")]
    backend = "nccl" if run.device.type == "cuda" else "gloo"
    num_units = sum(isinstance(each, graphfsdp.FSDPModule) for each in run.model.modules())
    instances = run.config.num_distributed_optimizer_instances
    if instances > 1:
        strategy += f" over {run.ranks.size // instances} ranks, {instances} times"
    return [
        ("ranks", f"{run.ranks.size} ({backend})"),
        ("sharding", f"{strategy}, {num_units} units"),
    ]
