"""What can be measured: named models in several sizes, suites made of them, and their batches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from graphfsdp.bench import zoo
from graphfsdp.bench.zoo import Workload
from graphfsdp.data import BYTES_VOCAB_SIZE, Batch, TokenBatches, load_corpus
from graphfsdp.errors import ConfigError
from graphfsdp.training.config import find_preset
from graphfsdp.training.gpt import GPT, GPTConfig
from graphfsdp.training.ranks import Ranks

SEED = 0  # of weights and batches, the same for every contender

DtypeName = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Case:
    """One workload in one precision; ``batch_size`` is samples per step on each rank."""

    name: str  # of the workload
    dtype: DtypeName
    batch_size: int
    contenders: tuple[str, ...] | None = None  # all of them

    @property
    def key(self) -> str:
        """The case's name in results."""
        return f"{self.name} {self.dtype} x{self.batch_size}"

    @property
    def workload(self) -> Workload:
        return find_workload(self.name)


def _gpt(layers: int, width: int, seq_length: int) -> GPTConfig:
    return GPTConfig(
        vocab_size=BYTES_VOCAB_SIZE,
        seq_length=seq_length,
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=width // min(64, width // 4),
    )


def _llama(layers: int, width: int, seq_length: int) -> GPTConfig:
    return replace(
        _gpt(layers, width, seq_length),
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


def workloads() -> Iterator[Workload]:
    yield _text("gpt-tiny", "GPT-2 style, 4 layers, width 64", _gpt(4, 64, 32), 4)
    yield _text("gpt-3m", "GPT-2 style, 4 layers, width 256", _gpt(4, 256, 128), 8)
    yield _text("gpt-11m", "GPT-2 style, 6 layers, width 384", _gpt(6, 384, 128), 8)
    yield _text("gpt2-124m", "GPT-2's smallest", _preset("gpt2-124m"), 8)
    yield _text("gpt2-355m", "GPT-2 medium", _preset("gpt2-355m"), 4)
    yield _text("llama-tiny", "Llama style, 4 layers, width 64", _llama(4, 64, 32), 4)
    yield _text("llama-4m", "Llama style, 4 layers, width 256", _llama(4, 256, 128), 8)
    yield _text("llama-160m", "Llama style, 12 layers", _preset("llama-160m", 1024), 8)
    yield _text("llama-1b", "Llama style, 22 layers", _preset("llama-1b", 1024), 4)
    yield from zoo.architectures()


def _text(name: str, description: str, config: GPTConfig, batch_size: int) -> Workload:
    return Workload(name, description, partial(GPT, config), batch_size, config.seq_length)


def find_workload(name: str) -> Workload:
    known = {workload.name: workload for workload in workloads()}
    if name not in known:
        raise ConfigError(f"there is no workload {name!r}; expected one of {', '.join(known)}")
    return known[name]


SuiteName = Literal["cpu", "gpu", "quick", "zoo"]
_FEW = ("eager", "pytorch", "full_iteration")
_QUICK = (*_FEW, "compile", "compiled_recording")
# What tells most in few minutes; the first cases have all of them.
_GPU = (*_QUICK, "fsdp2", "forward_backward")
# On a CPU torch.compile uses no CUDA graphs, and its mode for them would compile for nothing.
_CPU = (*_GPU, "fsdp2_compile")
# The most telling cases first.
SUITES: Mapping[SuiteName, tuple[Case, ...]] = MappingProxyType(
    {
        "cpu": (
            Case("gpt-tiny", "fp32", 4),
            Case("gpt-3m", "fp32", 8, _CPU),
            Case("gpt-tiny", "fp32", 64, _CPU),
            Case("llama-tiny", "bf16", 4, _CPU),
            Case("zoo-encoder", "fp32", 4, _CPU),
            Case("zoo-conv", "fp32", 4, _CPU),
            Case("gpt-tiny", "fp32", 1, _CPU),
            Case("gpt-tiny", "fp32", 16, _CPU),
            Case("gpt-11m", "fp32", 8, _FEW),
        ),
        "gpu": (
            Case("gpt-tiny", "fp32", 4),
            Case("gpt2-124m", "bf16", 8),
            Case("gpt2-124m", "bf16", 1, _GPU),
            Case("llama-160m", "bf16", 2, _GPU),
            Case("gpt2-124m", "bf16", 32, _GPU),
        ),
        "quick": (Case("gpt-tiny", "fp32", 4, _QUICK),),
        "zoo": tuple(
            Case(each.name, "fp32", each.batch_size, _QUICK) for each in zoo.architectures()
        ),
    }
)


@dataclass(frozen=True)
class BatchSource:
    """Another batch for each step, the same for every contender; it depends on step and rank."""

    make: Callable[[int], Batch]
    device: torch.device

    def take(self, first: int, num_steps: int) -> list[Batch]:
        made = [self.make(step) for step in range(first, first + num_steps)]
        return [tuple(tensor.to(self.device) for tensor in batch) for batch in made]


def batch_source(case: Case, device: torch.device, ranks: Ranks) -> BatchSource:
    rows, random = case.batch_size, case.workload.batch
    if random is not None:

        def make_random(step: int) -> Batch:
            number = int(np.random.default_rng((SEED, step, ranks.rank)).integers(2**62))
            return random(torch.Generator().manual_seed(number), rows)

        return BatchSource(make_random, device)
    together = rows * ranks.size
    batches = TokenBatches(
        load_corpus(None),
        seq_length=case.workload.items_per_sample,
        batch_size=together,
        seed=SEED,
        rank=ranks.rank,
        num_ranks=ranks.size,
    )
    return BatchSource(lambda step: batches.batch(step * together), device)
