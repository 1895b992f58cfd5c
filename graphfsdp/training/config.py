"""The settings of ``graphfsdp train``: named starting points, ``--config`` files, flags.

All three speak of the fields of TrainConfig, and each counts more than the one before. Flags have
Megatron's spelling.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import torch

from graphfsdp.cli import Parser, add_flags, flag_name, flags_of, require
from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.data import BYTES_VOCAB_SIZE
from graphfsdp.errors import ConfigError
from graphfsdp.training.gpt import GPTConfig, Normalization, PositionEmbeddingType
from graphfsdp.training.hugging_face import shape_of

DeviceChoice = Literal["auto", "cpu", "cuda"]
StrategyName = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


class IterationBatch(NamedTuple):
    """What one iteration trains on; sequences and tokens are those of all ranks together."""

    num_microbatches: int  # on each rank
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True)
class TrainConfig(GPTConfig):
    """A training run whose settings fit together.

    Each annotated field is a flag and a key of ``--config`` files. Messages name flags.
    """

    preset: str = "default"
    # Model. What is no flag of its shape follows from the preset or from --hf-model.
    vocab_size: Annotated[int | None, "size of the embedding; 256, for texts, if not given"] = None  # type: ignore[assignment]  # what ``gpt`` returns has one
    seq_length: Annotated[int, "tokens of a sequence"] = 256
    num_layers: Annotated[int, "transformer blocks"] = 4
    hidden_size: Annotated[int, "width of the residual stream"] = 192
    num_attention_heads: Annotated[int, "heads; must divide the hidden size"] = 6
    hidden_dropout: Annotated[float, "dropout after the embedding and after each branch"] = 0.0
    attention_dropout: Annotated[float, "dropout of the attention weights"] = 0.0
    position_embedding_type: PositionEmbeddingType = "rope"
    normalization: Normalization = "RMSNorm"
    swiglu: bool = True
    disable_bias_linear: bool = True
    hf_model: Annotated[
        str | None,
        "folder of a Llama or a GPT-2 as transformers saves it: its shape, and its weights to "
        "start from; --out keeps what was trained in the same form, in hugging_face",
    ] = None
    # Data and length of the run.
    data: Annotated[
        str | None,
        "a text file, a directory of text files (read as bytes, vocabulary 256), or tokens, which "
        "are mapped: a .bin file of uint16 or a .npy file of integers; if not given, the source "
        "files of Python's standard library; --data-path is Megatron's spelling",
        "--data-path",
    ] = None
    split: Annotated[
        str,
        "shares to train on and to hold out, which is at the end: the last 5%% of the tokens",
        "TRAIN,HELD_OUT",
    ] = "95,5"
    micro_batch_size: Annotated[int, "sequences of one forward and backward"] = 8
    global_batch_size: Annotated[
        int | None,
        "sequences of one iteration, a multiple of the micro-batch size times the number of "
        "ranks; what is left over becomes micro-batches, whose gradients are averaged before "
        "the one optimizer step; one micro-batch per rank if not given",
    ] = None
    train_iters: Annotated[int, "iterations to train"] = 320
    seed: Annotated[
        int,
        "decides initial weights, batches and dropout; none depends on the number of ranks but "
        "dropout",
    ] = 1234
    # Optimizer and schedule.
    lr: Annotated[float, "learning rate after warm-up"] = 3e-3
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root"],
        "how the learning rate goes from --lr to --min-lr; the graph reads it from the device, "
        "so nothing is captured again",
    ] = "cosine"
    lr_warmup_iters: Annotated[int, "iterations over which the rate first rises"] = 20
    min_lr: Annotated[float, "learning rate at the end"] = 0.0
    weight_decay: Annotated[float, "decoupled decay of matrices; vectors have none"] = 0.1
    adam_beta1: Annotated[float, "decay of the gradient's running mean"] = 0.9
    adam_beta2: Annotated[float, "decay of the squared gradient's running mean"] = 0.95
    adam_eps: Annotated[float, "added to the root of the second moment"] = 1e-8
    clip_grad: Annotated[
        float,
        "largest global norm of the gradient, clipped on the device inside the graph; 0 turns "
        "clipping off",
    ] = 1.0
    # Precision.
    bf16: Annotated[bool, "bfloat16 model weights and arithmetic, float32 main weights"] = False
    deterministic_mode: Annotated[
        bool,
        "only kernels that give the same bits each time, some of them slower; on a GPU a run can "
        "be repeated, and resumed, bit for bit with them alone",
    ] = False
    # From here on, what is seen or kept of a run, or how it is computed, but not its numbers; see
    # ``numbers``. Capture.
    cuda_graph_scope: Annotated[
        Literal["none", "forward_backward", "full_iteration"],
        "what is captured and then replayed with one launch: nothing, forward and backward "
        "(optimizer eager), or the whole iteration; the numbers are the same bits; "
        "--cuda-graph-impl is the newer spelling",
        "--cuda-graph-impl",
    ] = "full_iteration"
    compile: Annotated[
        Literal["off", "on", "auto"],
        "on a CPU, compile what was captured to C++: everything, or what is faster so; on a GPU "
        "(on) capture what torch.compile makes of the model; the numbers are then near those of "
        "eager, not the same bits",
    ] = "off"
    device: Annotated[DeviceChoice, "auto takes a GPU where there is one"] = "auto"
    # Several processes.
    data_parallel_sharding_strategy: Annotated[
        StrategyName,
        "what is cut into one part per rank, instead of being kept by all (ZeRO stages 0 to "
        "3): nothing; optimizer state and main weights; main grads too, reduced in every "
        "micro-batch; weights too, gathered block by block when they are needed; each saves "
        "more memory, and the losses are the same up to rounding; without torchrun there is "
        "nothing to cut",
    ] = "no_shard"
    num_distributed_optimizer_instances: Annotated[
        int,
        "cut over groups of ranks, and repeat that so many times: gradients go from group to "
        "group once an iteration, weights stay within one; must divide the number of ranks",
    ] = 1
    outer_dp_sharding_strategy: Annotated[
        Literal["no_shard", "optim"],
        "with several instances: each keeps the whole optimizer state, or a part of it",
    ] = "no_shard"
    init_model_with_meta_device: Annotated[
        bool,
        "build the model without memory, and draw its weights block by block on the device "
        "after it is cut, so that no rank ever holds all of it; for the same seed the weights "
        "are others than without this flag",
    ] = False
    distributed_timeout_minutes: Annotated[
        int, "how long a rank waits for another before the run ends with an error"
    ] = 10
    # Checkpoints.
    save: Annotated[
        str | None,
        "directory for checkpoints, on a file system that all ranks share; one is saved after "
        "the last iteration, and complete or not visible whatever happens meanwhile",
    ] = None
    save_interval: Annotated[int, "iterations between two checkpoints; 0 leaves the last one"] = 0
    keep_last: Annotated[int | None, "checkpoints to keep; all if not given"] = None
    async_save: Annotated[
        bool, "write checkpoints in the background, from a copy in the CPU's memory"
    ] = False
    load: Annotated[
        str | None,
        "go on with the latest checkpoint of this directory, or with one in it; exactly, if "
        "flags and number of ranks are the same; if it is that of --save and empty, start from "
        "nothing",
    ] = None
    # What is seen of the run.
    out: Annotated[
        str | None,
        "new or empty directory for config.json, metrics.jsonl and model.safetensors; nothing "
        "is written if not given",
    ] = None
    tensorboard: Annotated[bool, "also write what is logged for TensorBoard, in --out"] = False
    wandb: Annotated[
        str | None, "also send what is logged to this project of Weights & Biases", "PROJECT"
    ] = None
    log_interval: Annotated[int, "iterations between two log lines; only then the host waits"] = 10
    eval_interval: Annotated[
        int, "iterations between two validations; 0 leaves only the last one"
    ] = 80
    eval_iters: Annotated[int, "micro-batches of a validation, the same each time"] = 10
    # Time to a target, in the style of MLPerf.
    target_loss: Annotated[
        float | None, "end after the first validation whose loss is at most this"
    ] = None
    mllog: Annotated[
        str | None,
        "new file for MLLOG lines of the package mlperf-logging: the graph is captured on "
        "made-up tokens and everything put back, then the clock starts, and only then is the "
        "data touched",
    ] = None
    mllog_benchmark: Annotated[str, "name of the benchmark, such as llama31_8b", "NAME"] = (
        "graphfsdp_gpt"
    )

    def __post_init__(self) -> None:
        self._check_ranges()
        try:
            self.gpt()
            _ = self.sharding, self.held_out_percent
        except ConfigError as error:
            raise ConfigError(_in_flags(str(error))) from None
        self._check_together()

    def gpt(self) -> GPTConfig:
        shape = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        if self.vocab_size is None:
            shape["vocab_size"] = BYTES_VOCAB_SIZE
        return GPTConfig(**shape)

    def settings(self) -> dict[str, Any]:
        """Return what flags say, the preset's name included: what a ``--config`` file may hold."""
        names = ("preset", *flags_of(TrainConfig))
        return {name: getattr(self, name) for name in names}

    def numbers(self) -> dict[str, Any]:
        """Return the flags that decide a run's numbers."""
        names = [field.name for field in fields(self)]
        decide = set(names[: names.index("cuda_graph_scope")]) - {"preset", "micro_batch_size"}
        decide.add("compile")
        return {name: getattr(self, name) for name in names if name in decide}

    @property
    def held_out_percent(self) -> float:
        shares = self.split.split(",")
        try:
            train, held_out, unused = (float(share) for share in (*shares, "0")[:3])
        except ValueError:
            train = held_out = unused = -1.0
        if len(shares) > 3 or unused or not (train > 0 < held_out):
            raise ConfigError(
                f"--split {self.split} must be two numbers greater than 0, such as 95,5; a third "
                "one, which is Megatron's test data, must be 0"
            )
        return 100 * held_out / (train + held_out)

    @property
    def sharding(self) -> ShardingStrategy:
        return ShardingStrategy.parse(self.data_parallel_sharding_strategy)

    def batch(self, num_ranks: int) -> IterationBatch:
        """Cut an iteration over ranks.

        ConfigError: it does not come out even, or instances of the ranks do not; it names flags.
        """
        instances = self.num_distributed_optimizer_instances
        if num_ranks % instances:
            raise ConfigError(
                f"--num-distributed-optimizer-instances {instances} does not divide the "
                f"{num_ranks} ranks"
            )
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
        num_tokens = num_sequences * self.seq_length
        return IterationBatch(num_sequences // together, num_sequences, num_tokens)

    def lr_at(self, iteration: int) -> float:
        """Return the learning rate of an iteration, counted from 0.

        Each iteration of the warm-up has the rate of Megatron's next one, whose first one has 0 and
        trains nothing; all others have Megatron's own (``OptimizerParamScheduler.get_lr``).
        """
        warmup, style = self.lr_warmup_iters, self.lr_decay_style
        if warmup > 0 and iteration <= warmup:
            return self.lr * min(1.0, (iteration + 1) / float(warmup))
        if style == "constant":
            return self.lr
        if style == "inverse-square-root":
            roots = math.pow(max(warmup, 1), 0.5), math.pow(max(iteration, 1), 0.5)
            return max(self.min_lr, self.lr * roots[0] / roots[1])
        progress = float(iteration - warmup) / float(self.train_iters - warmup)
        left = 1.0 - progress
        if style == "cosine":
            left = 0.5 * (math.cos(math.pi * progress) + 1.0)
        return self.min_lr + left * (self.lr - self.min_lr)

    def is_success(self, val_loss: float) -> bool:
        return math.isfinite(val_loss) if self.target_loss is None else val_loss <= self.target_loss

    @property
    def param_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """Main weights and gradients are float32, whatever the model computes with."""
        main = torch.float32
        return MixedPrecisionPolicy(self.param_dtype, main, main)

    def _check_ranges(self) -> None:
        at_least_1 = (
            *("micro_batch_size", "global_batch_size", "train_iters", "log_interval", "eval_iters"),
            *("distributed_timeout_minutes", "keep_last", "num_distributed_optimizer_instances"),
        )
        at_least_0 = (
            *("lr_warmup_iters", "eval_interval", "save_interval"),
            *("weight_decay", "adam_eps", "clip_grad"),
        )
        ranges: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
            ("at least 1", lambda value: value >= 1, at_least_1),
            ("at least 0", lambda value: value >= 0, at_least_0),
            ("greater than 0", lambda value: value > 0, ("lr", "target_loss")),
            ("in [0, 1)", lambda value: 0 <= value < 1, ("adam_beta1", "adam_beta2")),
            ("at least 0 and below 2**63", lambda value: 0 <= value < 2**63, ("seed",)),
            (f"in [0, --lr {self.lr}]", lambda value: 0 <= value <= self.lr, ("min_lr",)),
        )
        for expected, holds, names in ranges:
            for name in names:
                value = getattr(self, name)
                if value is not None:  # it was given
                    require(name, value, holds(value), expected)

    def _check_together(self) -> None:
        needs = {"save": ("save_interval", "async_save", "keep_last"), "out": ("tensorboard",)}
        for folder, names in needs.items():
            for name in names:
                if getattr(self, name) and getattr(self, folder) is None:
                    raise ConfigError(f"{flag_name(name)} needs --{folder} DIR, which says where")
        clashes = {
            f"--lr-warmup-iters {self.lr_warmup_iters} leaves nothing of --train-iters "
            f"{self.train_iters} to train at the full rate; give fewer warm-up iterations": (
                self.lr_warmup_iters >= self.train_iters and self.lr_warmup_iters > 0
            ),
            f"--outer-dp-sharding-strategy {self.outer_dp_sharding_strategy} needs several "
            "instances to cut over: add --num-distributed-optimizer-instances": (
                self.outer_dp_sharding_strategy != "no_shard"
                and self.num_distributed_optimizer_instances == 1
            ),
            "--hf-model reads the whole weights of a model on each rank; leave out "
            "--init-model-with-meta-device": (
                self.hf_model is not None and self.init_model_with_meta_device
            ),
            "--mllog times a run from its first iteration, and --load goes on with another one; "
            "give one of them": self.mllog is not None and self.load is not None,
        }
        for message, holds in clashes.items():
            if holds:
                raise ConfigError(message)


def _in_flags(message: str) -> str:
    """Spell fields of the model's shape as the flags that set them."""
    for field in fields(GPTConfig):
        message = re.sub(rf"\b{field.name}\b", flag_name(field.name), message)
    return message


_SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "vocab_size": "model",
        "data": "data and length of the run",
        "lr": "optimizer and schedule",
        "bf16": "precision",
        "cuda_graph_scope": "capture",
        "data_parallel_sharding_strategy": "several processes (torchrun --nproc-per-node N -m "
        "graphfsdp train ...)",
        "save": "checkpoints",
        "out": "what is seen of the run",
        "target_loss": "time to a target, in the style of MLPerf (docs/bench.md)",
    }
)

# Settings that config.json of an earlier version holds, and that no number of a run depends on.
_ENDED = ("mllog_submission", "mllog_cache_cleared")

_OPENING = """\
Train a GPT with the whole iteration in one graph.

  graphfsdp train                                          the default GPT, about two minutes
  graphfsdp train --preset gpt2-124m --data tokens.bin --bf16 --out runs/one
  graphfsdp train --preset tiny --cuda-graph-scope none    the same bits, eagerly
  graphfsdp train --save runs/ckpt --load runs/ckpt        go on where the last start ended
  graphfsdp train --config run.toml --lr 1e-3              a file of settings; flags count more
  torchrun --nproc-per-node 2 -m graphfsdp train --data-parallel-sharding-strategy optim_grads

A preset says which model, with settings that go with it; --config and then flags override it. A
--config file is TOML or JSON with the names below ("micro_batch_size = 8"); the config.json that a
run keeps in --out is one."""


_GPT2_STYLE: Mapping[str, Any] = MappingProxyType(
    {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "disable_bias_linear": False,
    }
)
_TINY = TrainConfig(
    preset="tiny",
    **_GPT2_STYLE,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=32,
    micro_batch_size=4,
    train_iters=2000,
    eval_interval=500,
    log_interval=100,
)
_GPT2 = TrainConfig(
    **_GPT2_STYLE,
    vocab_size=50304,  # padded to a multiple of 128
    seq_length=1024,
    train_iters=1000,
    lr=6e-4,
    lr_warmup_iters=100,
    min_lr=6e-5,
)
_LLAMA = TrainConfig(
    untie_embeddings_and_output_weights=True,
    vocab_size=32000,
    seq_length=2048,
    micro_batch_size=4,
    train_iters=1000,
    lr=3e-4,
    lr_warmup_iters=100,
    min_lr=3e-5,
)


def _sized(style: TrainConfig, name: str, *sizes: int) -> TrainConfig:
    names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
    return replace(style, preset=name, **dict(zip(names, sizes, strict=False)))  # type: ignore[arg-type]


# Source: Grattafiori et al. 2024, table 3 (arXiv:2407.21783).
_LLAMA3 = replace(
    _sized(_LLAMA, "llama3-8b", 32, 4096, 32, 14336),
    num_query_groups=8,
    rotary_base=500_000.0,
    vocab_size=128_256,
    seq_length=8192,
    micro_batch_size=1,
    bf16=True,
)
# Source: rules of mlperf_logging 4.1.68 for training 6.1.0, closed division, and its reference
# convergence points (learning rate 4e-4 and 256 samples of warm-up at 16 sequences, the smallest
# global batch). What its data are (C4, tokenized for Llama 3.1) is for --data to say.
_MLPERF_LLAMA31_8B = replace(
    _LLAMA3,
    preset="llama31-8b-mlperf",
    global_batch_size=16,
    train_iters=1_200_000,
    lr=4e-4,
    lr_warmup_iters=16,
    min_lr=4e-5,
    adam_eps=1e-5,
    eval_interval=768,
    eval_iters=1024,
    target_loss=3.3,
    mllog_benchmark="llama31_8b",
)

# Configurations and what is said of them.
PRESETS: tuple[tuple[TrainConfig, str], ...] = (
    (TrainConfig(), "about two minutes on two CPU cores"),
    (_TINY, "4 layers, width 64, 4 x 32 tokens: bound by launches, not by arithmetic"),
    (_sized(_GPT2, "gpt2-124m", 12, 768, 12), "GPT-2's smallest"),
    (_sized(_GPT2, "gpt2-355m", 24, 1024, 16), "GPT-2 medium"),
    (_sized(_GPT2, "gpt2-774m", 36, 1280, 20), "GPT-2 large"),
    (_sized(_LLAMA, "llama-160m", 12, 768, 12, 2048), "Llama style, small"),
    (_sized(_LLAMA, "llama-1b", 22, 2048, 32, 5632), "Llama style, about a billion"),
    (_LLAMA3, "the shape of Llama 3, 8 billion"),
    (_MLPERF_LLAMA31_8B, "the same to a loss of 3.3, as MLPerf's llama31_8b asks for it"),
    (_sized(_LLAMA3, "llama3-70b", 80, 8192, 64, 28672), "the shape of Llama 3, 70 billion"),
    (_sized(_LLAMA3, "llama3-405b", 126, 16384, 128, 53248), "the shape of Llama 3, 405 billion"),
)


def find_preset(name: str) -> TrainConfig:
    return {config.preset: config for config, _ in PRESETS}[name]


def parse_train_arguments(arguments: Sequence[str]) -> TrainConfig:
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    file = given.pop("config", None)
    if file is not None:
        try:
            given = {**vars(parser.parse_args([*_words_of(Path(file))])), **given}
        except (ConfigError, OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"--config {file}: {error}") from None
    preset = find_preset(given.get("preset", "default"))
    if "train_iters" in given:
        # A preset's warm-up is for the preset's length; a shorter run gets a shorter one.
        shortest = min(preset.lr_warmup_iters, given["train_iters"] // 10)
        given.setdefault("lr_warmup_iters", max(shortest, 0))
    shape = shape_of(given["hf_model"]) if given.get("hf_model") is not None else {}
    return replace(preset, **{**shape, **given})


def _words_of(file: Path) -> Iterator[str]:
    """Yield a file's settings as flags, so that both are read and refused alike."""
    text = file.read_text(encoding="utf-8")
    data = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    if not isinstance(data, dict):
        raise ConfigError('holds no settings by name, such as {"lr": 1e-3}')
    for key, value in data.items():
        # What a run has added to its config.json, and null, which is what was not given.
        if key in ("resolved", "versions", *_ENDED) or value is None:
            continue
        if key in ("help", "config"):
            raise ConfigError(f"there is no setting {key!r}")
        flag = flag_name(key)
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        else:
            yield f"{flag}={value}"


def make_parser() -> Parser:
    presets = "".join(f"\n  {config.preset:<12} {about}" for config, about in PRESETS)
    parser = Parser(
        prog="graphfsdp train",
        usage="graphfsdp train [flags]",
        description=_OPENING,
        epilog=f"presets (flags override them; defaults above are those of 'default'):{presets}",
    )
    names = [config.preset for config, _ in PRESETS]
    about = f"start from one of: {', '.join(names)}"
    parser.add_argument("--preset", metavar="NAME", choices=names, help=about)
    parser.add_argument("--config", metavar="FILE", help="settings of a .toml or .json file")
    add_flags(parser, TrainConfig, _SECTIONS)
    return parser
