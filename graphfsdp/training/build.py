"""Makes the parts of a training run from its configuration, and checks that they fit."""

import os
from dataclasses import dataclass
from typing import Any

import torch

import graphfsdp
from graphfsdp.errors import ConfigError, PrecisionError
from graphfsdp.optim import FusedAdam
from graphfsdp.training.config import DeviceChoice, TrainConfig
from graphfsdp.training.corpus import Corpus, load_corpus
from graphfsdp.training.data import BatchSampler
from graphfsdp.training.gpt import GPT
from graphfsdp.training.schedule import make_scheduler


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a training run, ready for the first iteration."""

    config: TrainConfig
    device: torch.device
    corpus: Corpus
    sampler: BatchSampler
    model: GPT
    optimizer: FusedAdam
    scheduler: torch.optim.lr_scheduler.LambdaLR
    step: graphfsdp.CapturedStep


def build_run(config: TrainConfig) -> TrainingRun:
    """Make every part, the cheapest to refuse first.

    Raises:
        ConfigError: a part cannot be made, or two do not fit; the message names the flag.
    """
    _refuse_many_processes()
    device = choose_device(config.device)
    corpus = load_corpus(config.data)
    sampler = BatchSampler(
        corpus,
        seq_length=config.seq_length,
        batch_size=config.batch_size,
        seed=config.seed,
        device=device,
    )
    torch.manual_seed(config.seed)
    model = make_model(config, corpus, device)
    optimizer = make_optimizer(config, model)
    return TrainingRun(
        config=config,
        device=device,
        corpus=corpus,
        sampler=sampler,
        model=model,
        optimizer=optimizer,
        scheduler=make_scheduler(config, optimizer),
        step=_capture(config, model, optimizer),
    )


def choose_device(choice: DeviceChoice) -> torch.device:
    """Return the device to train on.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} finds no GPU; use --device cpu, or "
            f"install a driver and a build of torch for CUDA"
        )
    if choice == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def make_model(config: TrainConfig, corpus: Corpus, device: torch.device) -> GPT:
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
        param.data = param.data.to(config.param_dtype)
    return model.to(device)


def make_optimizer(config: TrainConfig, model: GPT) -> FusedAdam:
    """Return the optimizer; matrices decay, vectors (norms and biases) do not."""
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return FusedAdam(
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        use_decoupled_grad=config.use_precision_aware_optimizer,
        master_weights=config.master_weights,
    )


def _capture(config: TrainConfig, model: GPT, optimizer: FusedAdam) -> graphfsdp.CapturedStep:
    try:
        return graphfsdp.capture(
            model,
            optimizer,
            scope=config.cuda_graph_scope,
            warmup_steps=config.cuda_graph_warmup_steps,
            microbatches=config.num_microbatches,
            # An infinite limit measures the norm without clipping.
            max_grad_norm=config.clip_grad or float("inf"),
            mp_policy=config.mp_policy,
        )
    except PrecisionError:
        if config.main_grads_dtype == config.main_params_dtype:
            raise
        # The guard speaks of Python arguments; whoever gave flags is told which flags.
        raise PrecisionError(
            f"--main-grads-dtype {config.main_grads_dtype} does not go with --main-params-dtype "
            f"{config.main_params_dtype}: the optimizer would read a casted copy of each "
            f"gradient, not the persistent buffer; add --use-precision-aware-optimizer, or give "
            f"both the same dtype"
        ) from None


def _refuse_many_processes() -> None:
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if num_processes != "1":
        raise ConfigError(
            f"WORLD_SIZE is {num_processes}: the trainer runs in a single process and would "
            f"train {num_processes} equal copies; start it without torchrun"
        )


__all__ = ["TrainingRun", "build_run", "choose_device", "make_model", "make_optimizer"]
