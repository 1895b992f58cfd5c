"""A training run: its parts, made from its configuration, and its checkpoints."""

import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphfsdp
from graphfsdp.checkpoint import AsyncSaver, load, save
from graphfsdp.command_line import flag_name
from graphfsdp.data import BYTES_VOCAB_SIZE, Feed, TokenBatches, is_token_file, load_corpus
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.training.config import DeviceChoice, TrainConfig
from graphfsdp.training.gpt import GPT
from graphfsdp.training.hugging_face import load_weights
from graphfsdp.training.mllog import RunLog
from graphfsdp.training.ranks import Ranks
from graphfsdp.training.run_directory import begins_anew

_CHECKED_NUMEL = 1 << 20
_HYPER_PARAMETERS = ("betas", "eps", "weight_decay")


class TrainingRun:
    """What trains and on what, how far it has come, and its checkpoints.

    These keep, beside model, optimizer and generators, this object's state. The position in the
    data is a number of sequences, and the same on every rank.
    """

    iteration = 0  # done so far
    tokens = 0  # trained on, all ranks together

    def __init__(
        self, config: TrainConfig, ranks: Ranks, device: torch.device, log: RunLog
    ) -> None:
        """Make every part, the cheapest to refuse first; all ranks together, in a process group.

        With ``--mllog`` the graph is captured on made-up tokens before the data is touched, and the
        clock starts in between.
        """
        self.config, self.ranks, self.device = config, ranks, device
        self.batch, self._vocab_size = config.batch(ranks.size), _vocab_size(config)
        if config.mllog is None:
            self._load_data()
        ranks.refuse_differences({flag_name(key): value for key, value in asdict(config).items()})
        self.model = self._make_model()
        self.optimizer = make_optimizer(config, self.model, sharded=ranks.launched)
        self.step = graphfsdp.capture(
            self.model,
            self.optimizer,
            scope=config.cuda_graph_scope,
            microbatches=self.batch.num_microbatches,
            # An infinite limit measures the norm without clipping.
            max_grad_norm=config.clip_grad or float("inf"),
            example_batch=None if config.mllog is None else self._made_up_batch(),
            compile="auto" if config.compile == "auto" else config.compile == "on",
            mp_policy=config.mp_policy,
        )
        if config.mllog is not None:
            try:
                log.run_starts(self.step)
                self._load_data()
            except BaseException:  # whatever ends it, a graph must not outlive the process group
                self.step.close()
                raise
        self._saver = AsyncSaver() if config.save is not None and config.async_save else None

    def _load_data(self) -> None:
        config, ranks = self.config, self.ranks
        self.corpus = ranks.members.together(
            lambda: load_corpus(config.data, held_out_percent=config.held_out_percent)
        )
        self.batches = ranks.members.together(
            lambda: TokenBatches(
                self.corpus,
                seq_length=config.seq_length,
                batch_size=self.batch.num_sequences,
                seed=config.seed,
                rank=ranks.rank,
                num_ranks=ranks.size,
                vocab_size=self._vocab_size,
            )
        )
        self.feed = Feed(self.batches, self.device)
        held_out = zlib.crc32(self.corpus.validation[:_CHECKED_NUMEL].tobytes())
        facts = {
            "a number of training tokens of": len(self.corpus.train),
            "a checksum of held-out tokens of": held_out,
        }
        ranks.refuse_differences(facts)
        self._numbers: dict[str, Any] = {
            **config.numbers(),
            "global_batch_size": self.batch.num_sequences,
            "corpus": [*facts.values()],
        }

    def _make_model(self) -> GPT:
        config, ranks = self.config, self.ranks
        # A sharded model holds the main weights itself, and needs none beside them.
        dtype = torch.float32 if ranks.launched else config.param_dtype
        torch.manual_seed(config.seed)
        on_meta, folder = config.init_model_with_meta_device, config.hf_model
        where = torch.device("meta") if on_meta else self.device
        model = ranks.members.together(lambda: make_model(config, self._vocab_size, where, dtype))
        if folder is not None:
            ranks.members.together(lambda: load_weights(model, folder))
        if not on_meta:
            ranks.copy_first(model)
        if ranks.launched:
            shard_model(model, config, self.device)
        if on_meta:
            graphfsdp.materialize(model, self.device)
        if ranks.rank > 0:
            # Other dropout than the other ranks; rank 0 draws what a single process would.
            torch.manual_seed(config.seed + ranks.rank)
        return model

    def _made_up_batch(self) -> tuple[Tensor, ...]:
        """Random tokens and targets, [B, T], shaped like one rank's part of a batch."""
        batch = self.batch
        size = (batch.num_microbatches * batch.micro_batch_size, batch.seq_length + 1)
        # A generator of its own: torch's global one draws the same as in a run without this.
        generator = torch.Generator().manual_seed(0)
        windows = torch.randint(self._vocab_size, size, generator=generator).to(self.device)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": {"iteration": self.iteration, "tokens": self.tokens},
            "facts": self._numbers,
            "data": self.feed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the position, and note which settings are others now."""
        self.iteration, self.tokens = (state["position"][name] for name in ("iteration", "tokens"))
        saved, ours = state["facts"], self._numbers
        self._differences = [
            f"{'the data' if key == 'corpus' else flag_name(key)} was {saved[key]}, is {ours[key]}"
            for key in sorted(saved.keys() & ours.keys())
            if saved[key] != ours[key]
        ]
        self.feed.load_state_dict(state["data"])

    def resume(self) -> list[str]:
        """Load what ``--load`` names, if anything; return lines to print."""
        config, groups = self.config, self.optimizer.param_groups
        if config.load is None:
            return []
        if begins_anew(config):
            return [f"{config.load} has no checkpoint yet: the run starts from nothing"]
        # The hyper-parameters that this run's flags ask for; the same where these are.
        asked = [{name: group[name] for name in _HYPER_PARAMETERS} for group in groups]
        loaded = load(config.load, self.model, self.optimizer, objects={"run": self})
        if self.iteration >= config.train_iters:
            raise ConfigError(
                f"{loaded.path} has {self.iteration} iterations already; give more "
                f"--train-iters than {config.train_iters} to go on"
            )
        for group, hyper_parameters in zip(groups, asked, strict=True):
            group.update(hyper_parameters)
        lines = [f"resumed from {loaded.path} after {self.iteration} iterations"]
        if self._differences:
            lines.append(
                "other settings than saved, so no exact continuation: "
                + "; ".join(self._differences)
            )
        return lines

    def save_if_due(self, *, is_last: bool) -> None:
        config = self.config
        if config.save is None or not (is_last or is_due(self.iteration, config.save_interval)):
            return
        write = save if self._saver is None else self._saver.save
        write(
            config.save,
            self.model,
            self.optimizer,
            objects={"run": self},
            step=self.iteration,
            keep_last=config.keep_last,
        )

    def finish_saving(self) -> None:
        if self._saver is not None:
            self._saver.close()


def is_due(done: int, interval: int) -> bool:
    return interval > 0 and done % interval == 0


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
