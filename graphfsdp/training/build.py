"""Makes the parts of a training run from its configuration, and checks that they fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

import graphfsdp
from graphfsdp.errors import ConfigError, PrecisionError
from graphfsdp.optim import FusedAdam, ParamScheduler
from graphfsdp.training.config import DeviceChoice, IterationBatch, TrainConfig
from graphfsdp.training.corpus import Corpus, load_corpus
from graphfsdp.training.data import BatchSampler
from graphfsdp.training.gpt import GPT
from graphfsdp.training.ranks import Ranks
from graphfsdp.training.schedule import make_scheduler
from graphfsdp.training.sharding import shard_model


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a training run, ready for the first iteration."""

    config: TrainConfig
    ranks: Ranks
    batch: IterationBatch
    device: torch.device
    corpus: Corpus
    sampler: BatchSampler
    model: GPT
    optimizer: FusedAdam
    scheduler: ParamScheduler
    step: graphfsdp.CapturedStep


def build_run(config: TrainConfig, ranks: Ranks, device: torch.device) -> TrainingRun:
    """Make every part, the cheapest to refuse first; all ranks together, in a process group.

    Raises:
        ConfigError: a part cannot be made, or two do not fit; the message names the flag.
    """
    batch = config.batch(ranks.size)

    def make_local_parts() -> tuple[Corpus, BatchSampler, GPT]:
        corpus = load_corpus(config.data)
        sampler = BatchSampler(
            corpus,
            seq_length=config.seq_length,
            batch_size=batch.num_sequences,
            seed=config.seed,
            device=device,
            rank=ranks.rank,
            num_ranks=ranks.size,
        )
        torch.manual_seed(config.seed)
        dtype = config.main_dtype if ranks.launched else config.param_dtype
        return corpus, sampler, make_model(config, corpus, device, dtype)

    corpus, sampler, model = ranks.decide(make_local_parts)
    ranks.refuse_differences(_common_facts(config, corpus))
    ranks.copy_first(model)
    if ranks.rank > 0:
        # Other dropout than the other ranks; rank 0 draws what a single process would.
        torch.manual_seed(config.seed + ranks.rank)
    with _precision_in_flags(config):
        if ranks.launched:
            shard_model(model, config.sharding, config.mp_policy)
        optimizer = make_optimizer(config, model, sharded=ranks.launched)
        step = graphfsdp.capture(
            model,
            optimizer,
            scope=config.cuda_graph_scope,
            warmup_steps=config.cuda_graph_warmup_steps,
            microbatches=batch.num_microbatches,
            # An infinite limit measures the norm without clipping.
            max_grad_norm=config.clip_grad or float("inf"),
            mp_policy=config.mp_policy,
        )
    return TrainingRun(
        config=config,
        ranks=ranks,
        batch=batch,
        device=device,
        corpus=corpus,
        sampler=sampler,
        model=model,
        optimizer=optimizer,
        scheduler=make_scheduler(config, optimizer),
        step=step,
    )


def choose_device(choice: DeviceChoice, ranks: Ranks) -> torch.device:
    """Return the device to train on: with several ranks on a machine, one GPU each.

    Raises:
        ConfigError: a GPU was asked for and there is none, or there are fewer than ranks.
    """
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} finds no GPU; use --device cpu, or "
            f"install a driver and a build of torch for CUDA"
        )
    if choice == "cpu" or not available:
        return torch.device("cpu")
    if not ranks.launched:
        return torch.device("cuda", torch.cuda.current_device())
    num_gpus = torch.cuda.device_count()
    if ranks.local_size > num_gpus:
        raise ConfigError(
            f"{ranks.local_size} processes were started on this machine, but torch finds "
            f"{num_gpus} GPU(s), and each process needs its own; give torchrun --nproc-per-node "
            f"{num_gpus}, or --device cpu"
        )
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


def make_model(
    config: TrainConfig, corpus: Corpus, device: torch.device, dtype: torch.dtype
) -> GPT:
    """Return the model on its device, its weights drawn from torch's global generator.

    Raises:
        ConfigError: the corpus has tokens that the vocabulary lacks.
    """
    vocab_size = config.vocab_size or corpus.vocab_size
    if vocab_size < corpus.vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: {corpus.name} has tokens up to "
            f"{corpus.vocab_size - 1}; give --vocab-size {corpus.vocab_size} or more"
        )
    # Drawn on the CPU, so that a seed means the same weights on every device.
    model = GPT(config.gpt(vocab_size))
    # Parameters alone: buffers such as RoPE's tables stay in float32.
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model.to(device)


def make_optimizer(config: TrainConfig, model: GPT, *, sharded: bool) -> FusedAdam:
    """Return the optimizer; matrices decay, vectors (norms and biases) do not.

    Args:
        config: The run.
        model: Whose parameters to update.
        sharded: The parameters are main weights already, and need none beside them.
    """
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if config.weight_decay_incr_style != "constant":
        # Also where the decay begins at 0.
        groups[0]["wd_mult"] = 1.0
    return FusedAdam(
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        use_decoupled_grad=config.use_precision_aware_optimizer,
        master_weights=config.master_weights and not sharded,
    )


def _common_facts(config: TrainConfig, corpus: Corpus) -> dict[str, object]:
    """Return what must be equal on every rank, by the name that a message gives it."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in asdict(config).items()}
    return {
        **flags,
        "a number of training tokens of": len(corpus.train),
        "a unigram entropy of the corpus of": corpus.unigram_entropy,
    }


@contextmanager
def _precision_in_flags(config: TrainConfig) -> Iterator[None]:
    """The guard speaks of Python arguments; whoever gave flags is told which flags."""
    try:
        yield
    except PrecisionError:
        if config.main_grads_dtype == config.main_params_dtype:
            raise
        raise PrecisionError(
            f"--main-grads-dtype {config.main_grads_dtype} does not go with --main-params-dtype "
            f"{config.main_params_dtype}: the optimizer would read a casted copy of each "
            f"gradient, not the persistent buffer; add --use-precision-aware-optimizer, or give "
            f"both the same dtype"
        ) from None


__all__ = ["TrainingRun", "build_run", "choose_device", "make_model", "make_optimizer"]
