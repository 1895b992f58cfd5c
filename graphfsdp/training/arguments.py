"""The flags of ``graphfsdp train``, in Megatron's style, with help that teaches."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from graphfsdp.config import Scope, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.optim.schedule import (
    LR_DECAY_STYLES,
    LR_WSD_DECAY_STYLES,
    WEIGHT_DECAY_INCR_STYLES,
)
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.presets import PRESETS, find_preset

_SCOPES = tuple(scope.value for scope in Scope)
_STRATEGIES = tuple(strategy.value for strategy in ShardingStrategy)
_DTYPES = ("fp32", "bf16")


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag as every other bad input is reported: one line, no usage block."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; '{self.prog} --help' lists every flag")


def parse_train_arguments(arguments: Sequence[str]) -> TrainConfig:
    """Turn the command line after ``graphfsdp train`` into a training run.

    Raises:
        ConfigError: a flag, or a combination of flags, that cannot work.
        SystemExit: ``--help`` was asked for and printed.
    """
    given = vars(make_parser().parse_args(arguments))
    impl = given.pop("cuda_graph_impl", None)
    if impl is not None:
        scope = given.setdefault("cuda_graph_scope", impl)
        if scope != impl:
            raise ConfigError(
                f"--cuda-graph-scope {scope} and --cuda-graph-impl {impl} are two spellings of "
                f"one setting but differ; give one of them"
            )
    strategy = given.get("data_parallel_sharding_strategy")
    if strategy is not None:
        given["data_parallel_sharding_strategy"] = ShardingStrategy.parse(strategy).value
    preset = find_preset(given.get("preset", "default"))
    if {"lr_warmup_iters", "lr_warmup_fraction"} <= given.keys():
        raise ConfigError(
            "--lr-warmup-iters and --lr-warmup-fraction both say how long the warm-up is; give "
            "one of them"
        )
    if "train_iters" in given:
        # A preset's warm-up is for the preset's length; a shorter run gets a shorter one.
        shortest = min(preset.lr_warmup_iters, given["train_iters"] // 10)
        given.setdefault("lr_warmup_iters", max(shortest, 0))
    return replace(preset, **given)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; a flag that is not given leaves no trace in the result."""
    presets = "".join(f"\n  {preset.name:<12} {preset.description}" for preset in PRESETS)
    parser = _Parser(
        prog="graphfsdp train",
        description="Train a GPT with the whole iteration in one graph.",
        epilog=f"presets (flags override them; defaults below are those of 'default'):{presets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    names = [preset.name for preset in PRESETS]
    parser.add_argument("--preset", metavar="NAME", help=f"start from one of: {', '.join(names)}")
    for add_flags in (
        _add_model,
        _add_data,
        _add_optimizer,
        _add_precision,
        _add_capture,
        _add_ranks,
        _add_checkpoints,
        _add_run,
        _add_mllog,
    ):
        add_flags(parser)
    return parser


class _Group:
    """Adds flags to one section of the help, each with its default from ``TrainConfig``."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._group = parser.add_argument_group(title)
        self._defaults = TrainConfig()

    def value(self, flag: str, kind: type, explanation: str) -> None:
        """Add a flag that takes a value."""
        metavar = {int: "N", float: "X", str: "PATH"}[kind]
        self._add(flag, explanation, type=kind, metavar=metavar)

    def word(self, flag: str, explanation: str) -> None:
        """Add a flag that takes a name."""
        self._add(flag, explanation, metavar="NAME")

    def choice(self, flag: str, choices: Sequence[str], explanation: str) -> None:
        """Add a flag that takes one of a few words."""
        self._add(flag, explanation, choices=choices)

    def switch(self, flag: str, explanation: str) -> None:
        """Add a flag that turns something on, with ``--no-...`` to turn a preset's off."""
        self._add(flag, explanation, action=argparse.BooleanOptionalAction)

    def plain_switch(self, flag: str, explanation: str) -> None:
        """Add a flag that no preset turns on, so that it needs no opposite."""
        self._add(flag, explanation, action="store_true")

    def alias(self, flag: str, choices: Sequence[str], explanation: str) -> None:
        """Add another spelling of a flag; it has no field and no default of its own."""
        self._group.add_argument(flag, choices=choices, help=explanation)

    def _add(self, flag: str, explanation: str, **options: Any) -> None:
        default = getattr(self._defaults, flag.removeprefix("--").replace("-", "_"))
        # "is": 1.0 and 0.0 are defaults too, and equal to True and False.
        if default is not None and default is not False:
            explanation += f" (default: {'on' if default is True else default})"
        self._group.add_argument(flag, help=explanation, **options)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "model")
    group.value("--num-layers", int, "transformer blocks")
    group.value("--hidden-size", int, "width of the residual stream")
    group.value("--num-attention-heads", int, "heads; must divide the hidden size")
    group.value(
        "--num-query-groups", int, "heads of keys and values, each shared by several heads of "
        "queries; one for each head if not given",
    )  # fmt: skip
    group.value(
        "--ffn-hidden-size", int, "feed-forward width; 4 x hidden size if not given, or 8/3 x "
        "with --swiglu, which keeps the number of parameters",
    )  # fmt: skip
    group.choice(
        "--position-embedding-type", ("learned_absolute", "rope"),
        "a learned vector per position, or rotation of queries and keys",
    )  # fmt: skip
    group.choice("--normalization", ("LayerNorm", "RMSNorm"), "before each branch and at the end")
    group.switch("--swiglu", "gated feed-forward layers instead of GELU ones")
    group.switch(
        "--untie-embeddings-and-output-weights", "an output matrix of its own instead of the "
        "token embedding's",
    )  # fmt: skip
    group.switch("--disable-bias-linear", "no bias in linear layers")
    group.value("--hidden-dropout", float, "dropout after the embedding and after each branch")
    group.value("--attention-dropout", float, "dropout of the attention weights")
    group.value("--rotary-base", float, "longest wavelength of rotary positions, over 2 pi")
    group.value("--vocab-size", int, "size of the embedding; as the data needs if not given")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "data and length of the run")
    group.value(
        "--data", str, "a text file, a directory of text files (read as bytes, vocabulary 256), "
        "or a .bin file of uint16 tokens, which is mapped; if not given, the source files of "
        "Python's standard library; the last 5%% of the tokens are held out",
    )  # fmt: skip
    group.value("--seq-length", int, "tokens of a sequence")
    group.value("--micro-batch-size", int, "sequences of one forward and backward")
    group.value(
        "--global-batch-size", int, "sequences of one iteration, a multiple of the micro-batch "
        "size times the number of ranks; what is left over becomes micro-batches, whose gradients "
        "are averaged before the one optimizer step; one micro-batch per rank if not given",
    )  # fmt: skip
    group.value("--train-iters", int, "iterations to train")
    group.value(
        "--seed",
        int,
        "decides initial weights, batches and dropout; none depends on "
        "the number of ranks but dropout",
    )


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "optimizer and schedule")
    group.value("--lr", float, "learning rate after warm-up")
    group.choice(
        "--lr-decay-style", LR_DECAY_STYLES, "how the learning rate goes "
        "from --lr to --min-lr; the graph reads it from the device, so nothing is captured again",
    )  # fmt: skip
    group.value("--lr-decay-iters", int, "when the rate has reached --min-lr; --train-iters if "
                "not given")  # fmt: skip
    group.value("--lr-warmup-iters", int, "iterations over which the rate first rises")
    group.value("--lr-warmup-fraction", float, "the same as a share of --lr-decay-iters")
    group.value(
        "--lr-warmup-init", float, "rate of the very first iteration; if not given, it has its "
        "part of the rise already, where Megatron's has 0 and trains nothing",
    )  # fmt: skip
    group.choice(
        "--lr-wsd-decay-style", LR_WSD_DECAY_STYLES,
        "how the rate of --lr-decay-style WSD falls at the end",
    )  # fmt: skip
    group.value("--lr-wsd-decay-iters", int, "iterations over which that rate falls")
    group.value("--min-lr", float, "learning rate at the end")
    group.value("--weight-decay", float, "decoupled decay of matrices; vectors have none")
    group.choice(
        "--weight-decay-incr-style", WEIGHT_DECAY_INCR_STYLES, "how the decay goes from "
        "--start-weight-decay to --end-weight-decay in --train-iters; constant is --weight-decay",
    )  # fmt: skip
    group.value("--start-weight-decay", float, "decay of matrices in the first iteration")
    group.value("--end-weight-decay", float, "decay of matrices in the last one, no smaller")
    group.value("--adam-beta1", float, "decay of the gradient's running mean")
    group.value("--adam-beta2", float, "decay of the squared gradient's running mean")
    group.value("--adam-eps", float, "added to the root of the second moment")
    group.value(
        "--clip-grad", float, "largest global norm of the gradient, clipped on the device inside "
        "the graph; 0 turns clipping off",
    )  # fmt: skip
    group.plain_switch(
        "--optimizer-cpu-offload", "keep optimizer state in the CPU's memory and step there; "
        "needs --cuda-graph-scope forward_backward",
    )  # fmt: skip
    group.value(
        "--optimizer-offload-fraction", float, "share of a rank's weights to which that applies"
    )
    group.switch(
        "--overlap-cpu-optimizer-d2h-h2d", "copy gradients and weights while others are stepped"
    )
    group.switch("--pin-cpu-grads", "page-locked memory for the copies of gradients: faster")
    group.switch("--pin-cpu-params", "page-locked memory for the copies of weights: faster")


def _add_precision(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "precision")
    group.switch("--bf16", "bfloat16 model weights and arithmetic, float32 main weights")
    group.choice("--main-params-dtype", _DTYPES, "weights that the optimizer updates")
    group.choice(
        "--main-grads-dtype", _DTYPES, "persistent gradients; unlike --main-params-dtype they "
        "need --use-precision-aware-optimizer, else the optimizer would read a casted copy",
    )  # fmt: skip
    group.switch(
        "--use-precision-aware-optimizer", "the optimizer reads decoupled gradients, whose dtype "
        "need not be that of the weights",
    )  # fmt: skip


def _add_capture(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "capture")
    group.choice(
        "--cuda-graph-scope", _SCOPES, "what is captured and then replayed with one launch: "
        "nothing, forward and backward (optimizer eager), or the whole iteration; the numbers "
        "are the same bits",
    )  # fmt: skip
    group.alias("--cuda-graph-impl", _SCOPES, "newer spelling of --cuda-graph-scope")
    group.value(
        "--cuda-graph-warmup-steps", int, "eager iterations before the capture; they train too"
    )
    group.choice("--device", ("auto", "cpu", "cuda"), "auto takes a GPU where there is one")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "several processes (torchrun --nproc-per-node N -m graphfsdp train ...)")
    group.choice(
        "--data-parallel-sharding-strategy", (*_STRATEGIES, *"0123"), "what is cut into one part "
        "per rank, instead of being kept by all (0 to 3, the ZeRO stages): nothing; optimizer "
        "state and main weights; main grads too, reduced in every micro-batch; weights too, "
        "gathered block by block when they are needed; each saves more memory, and the losses are "
        "the same up to rounding; without torchrun there is nothing to cut",
    )  # fmt: skip
    group.value(
        "--num-distributed-optimizer-instances", int, "cut over groups of ranks, and repeat that "
        "so many times: gradients go from group to group once an iteration, weights stay within "
        "one; must divide the number of ranks",
    )  # fmt: skip
    group.choice(
        "--outer-dp-sharding-strategy", ("no_shard", "optim"), "with several instances: each "
        "keeps the whole optimizer state, or a part of it",
    )  # fmt: skip
    group.switch(
        "--init-model-with-meta-device", "build the model without memory, and draw its weights "
        "block by block on the device after it is cut, so that no rank ever holds all of it; for "
        "the same seed the weights are others than without this flag",
    )  # fmt: skip
    group.value(
        "--distributed-timeout-minutes", int, "how long a rank waits for another before the run "
        "ends with an error",
    )  # fmt: skip


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "checkpoints")
    group.value(
        "--save", str, "directory for checkpoints, on a file system that all ranks share; one is "
        "saved after the last iteration, and complete or not visible whatever happens meanwhile",
    )  # fmt: skip
    group.value("--save-interval", int, "iterations between two checkpoints; 0 leaves the last one")
    group.value("--keep-last", int, "checkpoints to keep; all if not given")
    group.plain_switch(
        "--async-save", "write checkpoints in the background, from a copy in the CPU's memory"
    )
    group.value(
        "--load", str, "go on with the latest checkpoint of this directory, or with one in it; "
        "exactly, if flags and number of ranks are the same; if it is that of --save and empty, "
        "start from nothing",
    )  # fmt: skip


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "what is seen of the run")
    group.value(
        "--out", str, "new or empty directory for config.json, metrics.jsonl, loss.png and "
        "model.safetensors; nothing is written if not given",
    )  # fmt: skip
    group.value("--log-interval", int, "iterations between two log lines; only then the host waits")
    group.value(
        "--eval-interval", int, "iterations between two validations; 0 leaves only the last one"
    )
    group.value("--eval-iters", int, "micro-batches of a validation, the same each time")
    group.value("--sample-tokens", int, "tokens to generate at the end; 0 for none")
    group.plain_switch("--no-progress", "no progress bar (a pipe or a file gets none anyway)")


def _add_mllog(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "time to a target, in the style of MLPerf (docs/bench.md)")
    group.value("--target-loss", float, "end after the first validation whose loss is at most this")
    group.value(
        "--mllog", str, "new file for MLLOG lines of the package mlperf-logging: the graph is "
        "captured on made-up tokens and everything put back, then the clock starts, and only "
        "then is the data touched",
    )  # fmt: skip
    group.word("--mllog-benchmark", "name of the benchmark, such as llama31_8b")
    group.word("--mllog-org", "who has run it")
    group.word("--mllog-platform", "on what; number and name of the devices if not given")
    group.choice("--mllog-division", ("closed", "open"), "whose rules the run follows")
    group.choice("--mllog-status", ("onprem", "cloud", "research"), "how others can get the like")
    group.plain_switch(
        "--mllog-cache-cleared", "whoever started this run has emptied the system's caches before"
    )
