"""Makes the parts of a training run from its configuration, and checks that they fit."""

import zlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphfsdp
from graphfsdp.command_line import flag_name
from graphfsdp.data import (
    BYTES_VOCAB_SIZE,
    Corpus,
    Feed,
    TokenBatches,
    is_token_file,
    load_corpus,
)
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.training.config import DeviceChoice, IterationBatch, TrainConfig
from graphfsdp.training.gpt import GPT
from graphfsdp.training.hugging_face import load_weights
from graphfsdp.training.mllog import RunLog
from graphfsdp.training.ranks import Ranks

_CHECKED_NUMEL = 1 << 20


@dataclass(frozen=True)
class TrainingRun:
    config: TrainConfig
    ranks: Ranks
    batch: IterationBatch
    device: torch.device
    corpus: Corpus
    batches: TokenBatches
    feed: Feed  # of these
    model: GPT
    optimizer: FusedAdam
    step: graphfsdp.CapturedStep


def build_run(config: TrainConfig, ranks: Ranks, device: torch.device, log: RunLog) -> TrainingRun:
    """Make every part, the cheapest to refuse first; all ranks together, in a process group.

    With ``--mllog`` the graph is captured on made-up tokens before the data is touched, and the
    clock starts in between.
    """
    batch, vocab_size = config.batch(ranks.size), _vocab_size(config)

    def load_data() -> tuple[Corpus, TokenBatches]:
        corpus = load_corpus(config.data, held_out_percent=config.held_out_percent)
        batches = TokenBatches(
            corpus,
            seq_length=config.seq_length,
            batch_size=batch.num_sequences,
            seed=config.seed,
            rank=ranks.rank,
            num_ranks=ranks.size,
            vocab_size=vocab_size,
        )
        return corpus, batches

    data = ranks.members.together(load_data) if config.mllog is None else None
    flags = {flag_name(name): value for name, value in asdict(config).items()}
    ranks.refuse_differences({**flags, **(corpus_facts(data[0]) if data is not None else {})})
    example = _made_up_batch(batch, vocab_size, device) if data is None else None
    model, optimizer, step = _make_program(config, ranks, device, vocab_size, example)
    if data is None:
        try:
            log.run_starts(step)
            data = ranks.members.together(load_data)
            ranks.refuse_differences(corpus_facts(data[0]))
        except BaseException:  # whatever ends it, a graph must not outlive the process group
            step.close()
            raise
    corpus, batches = data
    return TrainingRun(
        config=config,
        ranks=ranks,
        batch=batch,
        device=device,
        corpus=corpus,
        batches=batches,
        feed=Feed(batches, device),
        model=model,
        optimizer=optimizer,
        step=step,
    )


def _make_program(
    config: TrainConfig,
    ranks: Ranks,
    device: torch.device,
    vocab_size: int,
    example: tuple[Tensor, ...] | None,
) -> tuple[GPT, FusedAdam, graphfsdp.CapturedStep]:
    # A sharded model holds the main weights itself, and needs none beside them.
    dtype = torch.float32 if ranks.launched else config.param_dtype
    torch.manual_seed(config.seed)
    on_meta = config.init_model_with_meta_device
    where = torch.device("meta") if on_meta else device
    model = ranks.members.together(lambda: make_model(config, vocab_size, where, dtype))
    if config.hf_model is not None:
        folder = config.hf_model
        ranks.members.together(lambda: load_weights(model, folder))
    if not on_meta:
        ranks.copy_first(model)
    if ranks.launched:
        shard_model(model, config, device)
    if on_meta:
        graphfsdp.materialize(model, device)
    if ranks.rank > 0:
        # Other dropout than the other ranks; rank 0 draws what a single process would.
        torch.manual_seed(config.seed + ranks.rank)
    optimizer = make_optimizer(config, model, sharded=ranks.launched)
    step = graphfsdp.capture(
        model,
        optimizer,
        scope=config.cuda_graph_scope,
        microbatches=config.batch(ranks.size).num_microbatches,
        # An infinite limit measures the norm without clipping.
        max_grad_norm=config.clip_grad or float("inf"),
        example_batch=example,
        compile="auto" if config.compile == "auto" else config.compile == "on",
        mp_policy=config.mp_policy,
    )
    return model, optimizer, step


def shard_model(model: GPT, config: TrainConfig, device: torch.device) -> None:
    """Make a unit of each block and one of the rest, which holds tied embeddings too.

    Of several instances each holds all shards.
    """
    instances, mesh = config.num_distributed_optimizer_instances, None
    if instances > 1:
        mesh = init_device_mesh(
            device.type,
            (instances, dist.get_world_size() // instances),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
    for module in (*model.blocks.children(), model):
        graphfsdp.fully_shard(
            module,
            mesh,
            strategy=config.sharding,
            mp_policy=config.mp_policy,
            outer_strategy=config.outer_dp_sharding_strategy,
        )


def choose_device(choice: DeviceChoice, ranks: Ranks) -> torch.device:
    """With several ranks on a machine, one GPU each."""
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
    config: TrainConfig, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> GPT:
    """Weights are drawn from torch's global generator."""
    # Drawn on the CPU, so that a seed means the same weights on every device.
    with torch.device("meta" if device.type == "meta" else "cpu"):
        model = GPT(config.gpt(vocab_size))
    # Parameters alone: buffers such as RoPE's tables stay in float32.
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model.to(device)


def _vocab_size(config: TrainConfig) -> int:
    """Known before the data is touched, which waits for the clock of ``--mllog``."""
    if config.data is not None and is_token_file(config.data):
        if config.vocab_size is None:
            raise ConfigError(
                f"--data {config.data} holds tokens; say with --vocab-size how many there are"
            )
        return config.vocab_size
    vocab_size = config.vocab_size or BYTES_VOCAB_SIZE
    if vocab_size < BYTES_VOCAB_SIZE:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small for texts, which are read as bytes; give "
            f"--vocab-size {BYTES_VOCAB_SIZE} or more"
        )
    return vocab_size


def _made_up_batch(
    batch: IterationBatch, vocab_size: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Random tokens and targets, [B, T], shaped like one rank's part of a batch."""
    size = (batch.num_microbatches * batch.micro_batch_size, batch.seq_length + 1)
    # A generator of its own: torch's global one draws the same as in a run without this.
    windows = torch.randint(vocab_size, size, generator=torch.Generator().manual_seed(0))
    windows = windows.to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def make_optimizer(config: TrainConfig, model: nn.Module, *, sharded: bool) -> FusedAdam:
    """Return the optimizer; matrices decay, vectors (norms and biases) do not.

    Sharded parameters are main weights already, and need none beside them.
    """
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
        master_weights=config.bf16 and not sharded,
    )


def corpus_facts(corpus: Corpus) -> dict[str, int]:
    """Return what must be equal on every rank, by the name that a message gives it."""
    return {
        "a number of training tokens of": len(corpus.train),
        "a checksum of held-out tokens of": zlib.crc32(
            corpus.validation[:_CHECKED_NUMEL].tobytes()
        ),
    }
