"""What can be measured: named models in several sizes, and the suites made of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from graphfsdp.bench import zoo
from graphfsdp.bench.models import (
    NUM_SPECIAL,
    BertConfig,
    BertModel,
    ConvConfig,
    ConvNet,
    MoEConfig,
    MoEModel,
)
from graphfsdp.errors import ConfigError
from graphfsdp.training.arguments import find_preset
from graphfsdp.training.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class ZooConfig:
    name: str

    @property
    def architecture(self) -> zoo.Architecture:
        return zoo.architectures()[self.name]


ModelConfig = GPTConfig | MoEConfig | BertConfig | ConvConfig | ZooConfig
DtypeName = Literal["fp32", "bf16"]
DTYPES: tuple[DtypeName, ...] = ("fp32", "bf16")
# Bytes of text, and the three tokens that BERT adds, rounded up.
_BYTES, _BYTES_AND_SPECIAL = 256, 264


@dataclass(frozen=True)
class Workload:
    """``batch_size`` is samples per step on each rank, where none is asked for."""

    name: str
    family: str
    description: str
    model: ModelConfig
    batch_size: int

    @property
    def items_per_sample(self) -> int:
        """Tokens of a sequence; 1 for an image or a series."""
        if isinstance(self.model, ZooConfig):
            return self.model.architecture.items_per_sample
        return 1 if isinstance(self.model, ConvConfig) else language_shape(self.model).seq_length

    @property
    def unit(self) -> str:
        if isinstance(self.model, ConvConfig):
            return "images"
        return "tokens" if self.items_per_sample > 1 else "samples"

    def with_vocabulary(self, num_tokens: int) -> "Workload":
        if isinstance(self.model, ConvConfig | ZooConfig):
            return self
        special = NUM_SPECIAL if isinstance(self.model, BertConfig) else 0
        size = max(language_shape(self.model).vocab_size, num_tokens + special)
        if isinstance(self.model, MoEConfig):
            gpt = replace(self.model.gpt, vocab_size=size)
            return replace(self, model=replace(self.model, gpt=gpt))
        return replace(self, model=replace(self.model, vocab_size=size))


@dataclass(frozen=True)
class Case:
    """One workload in one precision; ``batch_size`` is samples per step on each rank."""

    workload: Workload
    dtype: DtypeName
    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"a batch size must be at least 1, got {self.batch_size}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def key(self) -> str:
        """The case's name in results; that of ``WorkloadFacts.key``."""
        return f"{self.workload.name} {self.dtype} x{self.batch_size}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the weights that forward and backward compute with."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32


def language_shape(model: GPTConfig | MoEConfig | BertConfig) -> GPTConfig | BertConfig:
    """Return what has the vocabulary and the length of a sequence."""
    return model.gpt if isinstance(model, MoEConfig) else model


def make_model(model: ModelConfig) -> nn.Module:
    """Return the model, which returns its loss; torch's global generator draws its weights."""
    match model:
        case ZooConfig():
            return model.architecture.make()
        case GPTConfig():
            return GPT(model)
        case MoEConfig():
            return MoEModel(model)
        case BertConfig():
            return BertModel(model)
        case ConvConfig():
            return ConvNet(model)


def _gpt(layers: int, width: int, seq_length: int, vocab_size: int = _BYTES) -> GPTConfig:
    return GPTConfig(
        vocab_size=vocab_size,
        seq_length=seq_length,
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=width // min(64, width // 4),
    )


def _llama(layers: int, width: int, seq_length: int, vocab_size: int = _BYTES) -> GPTConfig:
    return replace(
        _gpt(layers, width, seq_length, vocab_size),
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        untie_embeddings_and_output_weights=True,
        disable_bias_linear=True,
    )


def _preset(name: str, seq_length: int | None = None) -> GPTConfig:
    config = find_preset(name)
    assert config.vocab_size is not None
    shape = config.gpt(config.vocab_size)
    return shape if seq_length is None else replace(shape, seq_length=seq_length)


def _bert(layers: int, width: int, seq_length: int, vocab_size: int) -> BertConfig:
    return BertConfig(vocab_size, seq_length, layers, width, max(1, width // 64))


def workloads() -> Iterator[Workload]:
    yield Workload("gpt-tiny", "gpt", "GPT-2 style, 4 layers, width 64", _gpt(4, 64, 32), 4)
    yield Workload("gpt-3m", "gpt", "GPT-2 style, 4 layers, width 256", _gpt(4, 256, 128), 8)
    yield Workload("gpt-11m", "gpt", "GPT-2 style, 6 layers, width 384", _gpt(6, 384, 128), 8)
    yield Workload("gpt2-124m", "gpt", "GPT-2's smallest", _preset("gpt2-124m"), 8)
    yield Workload("gpt2-355m", "gpt", "GPT-2 medium", _preset("gpt2-355m"), 4)
    yield Workload("llama-tiny", "llama", "Llama style, 4 layers, width 64", _llama(4, 64, 32), 4)
    yield Workload("llama-4m", "llama", "Llama style, 4 layers, width 256", _llama(4, 256, 128), 8)
    yield Workload("llama-160m", "llama", "Llama style, 12 layers", _preset("llama-160m", 1024), 8)
    yield Workload("llama-1b", "llama", "Llama style, 22 layers", _preset("llama-1b", 1024), 4)
    tiny = replace(_llama(4, 64, 32), ffn_hidden_size=128)
    yield Workload("moe-tiny", "moe", "8 experts, 2 per token, 4 layers", MoEConfig(tiny), 4)
    small = replace(_llama(8, 512, 512, 32000), ffn_hidden_size=1024)
    yield Workload("moe-180m", "moe", "16 experts, 2 per token, 8 layers", MoEConfig(small, 16), 8)
    bert_tiny = _bert(2, 128, 64, _BYTES_AND_SPECIAL)
    yield Workload("bert-tiny", "bert", "2 layers, width 128", bert_tiny, 4)
    yield Workload("bert-base", "bert", "12 layers, width 768", _bert(12, 768, 512, 30528), 8)
    yield Workload("bert-large", "bert", "24 layers, width 1024", _bert(24, 1024, 512, 30528), 8)
    yield Workload("conv-tiny", "conv", "residual net, 3 blocks, 32 x 32", ConvConfig(8, 1), 8)
    yield Workload("conv-small", "conv", "residual net, 9 blocks, 32 x 32", ConvConfig(64, 3), 64)
    for name, found in zoo.architectures().items():
        about = f"{found.description}, width {zoo.WIDTH}"
        yield Workload(f"zoo-{name}", "zoo", about, ZooConfig(name), 4)


def find_workload(name: str) -> Workload:
    known = {workload.name: workload for workload in workloads()}
    if name not in known:
        raise ConfigError(f"there is no workload {name!r}; expected one of {', '.join(known)}")
    return known[name]


@dataclass(frozen=True)
class PlannedCase:
    """A case and how it is measured; ``contenders`` None is all of them."""

    case: Case
    contenders: tuple[str, ...] | None = None
    memory: bool = True


def plan_cases(
    names: Sequence[str],
    batch_sizes: Sequence[int] | None,
    dtypes: Sequence[DtypeName],
    contenders: tuple[str, ...] | None,
    *,
    memory: bool,
) -> tuple[PlannedCase, ...]:
    """Product of workloads, precisions and batch sizes (None: each workload's own)."""
    found = [find_workload(name) for name in dict.fromkeys(names)]
    return tuple(
        PlannedCase(Case(workload, dtype, size), contenders, memory)
        for workload in found
        for dtype in dict.fromkeys(dtypes)
        for size in dict.fromkeys(batch_sizes or [workload.batch_size])
    )


SUITES = ("cpu", "gpu", "quick", "zoo")
_FEW = ("eager", "pytorch", "full_iteration")
# On a CPU torch.compile uses no CUDA graphs, so that one case shows what its mode for them does.
_CPU = (
    *("eager", "pytorch", "compile", "fsdp2", "fsdp2_compile", "megatron_fsdp"),
    *("forward_backward", "full_iteration", "compile_full_iteration"),
)
# What tells most in few minutes; the first cases have all of them.
_GPU = (
    *("eager", "pytorch", "compile", "fsdp2"),
    *("forward_backward", "full_iteration", "compile_full_iteration"),
)


def suite(name: str) -> tuple[PlannedCase, ...]:
    """Return the cases of one of SUITES, the most telling ones first."""
    match name:
        case "cpu":
            return (
                _planned("gpt-tiny", "fp32", 4, None, memory=True),
                _planned("gpt-3m", "fp32", 8, _CPU, memory=True),
                _planned("gpt-tiny", "fp32", 64, _CPU),
                _planned("llama-tiny", "bf16", 4, _CPU),
                _planned("moe-tiny", "fp32", 4, _CPU),
                _planned("bert-tiny", "fp32", 4, _CPU),
                _planned("conv-tiny", "fp32", 8, _CPU),
                _planned("gpt-tiny", "fp32", 1, _CPU),
                _planned("gpt-tiny", "fp32", 16, _CPU),
                _planned("gpt-11m", "fp32", 8, _FEW),
            )
        case "gpu":
            return (
                _planned("gpt-tiny", "fp32", 4, None),
                _planned("gpt2-124m", "bf16", 8, None),
                _planned("gpt2-124m", "bf16", 1, _GPU),
                _planned("llama-160m", "bf16", 2, _GPU),
                _planned("moe-180m", "bf16", 4, _GPU),
                _planned("bert-base", "bf16", 8, _GPU),
                _planned("conv-small", "fp32", 64, _GPU),
                _planned("gpt2-124m", "bf16", 32, _GPU),
            )
        case "zoo":
            names = (each.name for each in workloads() if each.family == "zoo")
            return tuple(_planned(each, "fp32", 4, _FEW) for each in names)
        case _:
            return (_planned("gpt-tiny", "fp32", 4, _FEW),)


def _planned(
    name: str,
    dtype: DtypeName,
    batch_size: int,
    contenders: tuple[str, ...] | None,
    *,
    memory: bool = False,
) -> PlannedCase:
    return PlannedCase(Case(find_workload(name), dtype, batch_size), contenders, memory)
