"""The settings of ``graphfsdp train``: named starting points, ``--config`` files, flags.

All three speak of the fields of TrainConfig, and each counts more than the one before. Flags have
Megatron's spelling.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from graphfsdp.command_line import Parser, add_flags, flag_name
from graphfsdp.errors import ConfigError
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.hugging_face import shape_of

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


# The vocabulary is padded to a multiple of 128.
_GPT2 = TrainConfig(
    position_embedding_type="learned_absolute",
    normalization="LayerNorm",
    swiglu=False,
    disable_bias_linear=False,
    vocab_size=50304,
    seq_length=1024,
    micro_batch_size=8,
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
# Source: Grattafiori et al. 2024, table 3 (arXiv:2407.21783).
_LLAMA3 = replace(
    _LLAMA,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    rotary_base=500_000.0,
    vocab_size=128_256,
    seq_length=8192,
    micro_batch_size=1,
    bf16=True,
)


def _sized(
    style: TrainConfig,
    name: str,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    ffn_hidden_size: int | None = None,
) -> TrainConfig:
    return replace(
        style,
        preset=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        ffn_hidden_size=ffn_hidden_size,
    )


# Source: rules of mlperf_logging 4.1.68 for training 6.1.0, closed division, and its reference
# convergence points (learning rate 4e-4 and 256 samples of warm-up at 16 sequences, the smallest
# global batch). What its data are (C4, tokenized for Llama 3.1) is for --data to say.
_MLPERF_LLAMA31_8B = replace(
    _sized(_LLAMA3, "llama31-8b-mlperf", 32, 4096, 32, 14336),
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
_TINY = TrainConfig(
    preset="tiny",
    hidden_size=64,
    num_attention_heads=4,
    position_embedding_type="learned_absolute",
    normalization="LayerNorm",
    swiglu=False,
    disable_bias_linear=False,
    seq_length=32,
    micro_batch_size=4,
    train_iters=2000,
    eval_interval=500,
    log_interval=100,
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
    (_sized(_LLAMA3, "llama3-8b", 32, 4096, 32, 14336), "the shape of Llama 3, 8 billion"),
    (_MLPERF_LLAMA31_8B, "the same to a loss of 3.3, as MLPerf's llama31_8b asks for it"),
    (_sized(_LLAMA3, "llama3-70b", 80, 8192, 64, 28672), "the shape of Llama 3, 70 billion"),
    (_sized(_LLAMA3, "llama3-405b", 126, 16384, 128, 53248), "the shape of Llama 3, 405 billion"),
)


def find_preset(name: str) -> TrainConfig:
    configs = {config.preset: config for config, _ in PRESETS}
    if name in configs:
        return configs[name]
    known = ", ".join(configs)
    raise ConfigError(f"--preset {name}: there is no such preset; choose one of {known}")


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
    names = ", ".join(config.preset for config, _ in PRESETS)
    parser.add_argument("--preset", metavar="NAME", help=f"start from one of: {names}")
    parser.add_argument("--config", metavar="FILE", help="settings of a .toml or .json file")
    add_flags(parser, TrainConfig, _SECTIONS)
    return parser
