"""What can be measured: named models in several sizes, suites made of them, and their batches.

Twelve small architectures, the zoo, have kernels so short that calling them is what costs; four
rows of width 32 are a usual batch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphfsdp.data import BYTES_VOCAB_SIZE, Batch, TokenBatches, load_corpus
from graphfsdp.training.config import find_preset
from graphfsdp.training.gpt import GPT, GPTConfig
from graphfsdp.training.ranks import Ranks

SEED = 0  # of weights and batches, the same for every contender
WIDTH = 32
TOKENS = 16
ROWS = 4
VOCABULARY = 64
_LLAMA: Mapping[str, Any] = MappingProxyType(
    {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}
)

DtypeName = Literal["fp32", "bf16"]


def tokens(generator: torch.Generator, rows: int) -> Batch:  # ids, targets: [rows, TOKENS] int64
    ids = torch.randint(VOCABULARY, (2, rows, TOKENS), generator=generator)
    return ids[0], ids[1]


def images(generator: torch.Generator, rows: int) -> Batch:  # [rows, 3, 16, 16], [rows] int64
    pixels = torch.randn(rows, 3, 16, 16, generator=generator)
    return pixels, torch.randint(10, (rows,), generator=generator)


def series(generator: torch.Generator, rows: int) -> Batch:  # [rows, TOKENS, WIDTH], [rows] int64
    values = torch.randn(rows, TOKENS, WIDTH, generator=generator)
    return values, torch.randint(10, (rows,), generator=generator)


@dataclass(frozen=True)
class Workload:
    """What is trained.

    ``make`` returns a model that returns its loss; torch's global generator draws its weights.
    ``batch_size`` is samples per step on each rank, where none is asked for; ``items_per_sample``
    are tokens of a sequence, and 1 of an image or a series. Without ``batch`` samples are text.
    """

    name: str
    description: str
    make: Callable[[], nn.Module]
    batch_size: int
    items_per_sample: int
    batch: Callable[[torch.Generator, int], Batch] | None = None

    @property
    def unit(self) -> str:
        return "tokens" if self.items_per_sample > 1 else "samples"


class Classifier(nn.Module):
    """A body, the mean over its second dim where there is one, and a linear head."""

    def __init__(self, body: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        hidden = self.body(x)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        hidden = hidden.mean(dim=1) if hidden.dim() == 3 else hidden
        return functional.cross_entropy(self.head(hidden), classes)


class TokenModel(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = body
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.body(self.embedding(ids)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Translator(TokenModel):
    def __init__(self) -> None:
        super().__init__(nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout=0.1, batch_first=True))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS))

    def forward(self, source: Tensor, targets: Tensor) -> Tensor:
        mask = self.get_buffer("mask")
        source, shifted = self.embedding(source), self.embedding(targets)
        hidden = self.body(source, shifted, tgt_mask=mask, tgt_is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class MixtureLayer(nn.Module):
    """Top-2 of 4 experts; each expert sees each token, so that all shapes are fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        weights, chosen = self.gate(hidden).softmax(-1).topk(2, dim=-1)
        combine = weights.new_zeros(*x.shape[:-1], 4).scatter(-1, chosen, weights)
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=-2)
        mixed: Tensor = x + (combine.unsqueeze(-1) * outputs).sum(dim=-2)
        return mixed


class MixerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 32), nn.GELU(), nn.Linear(32, TOKENS))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.channels(self.norms[1](x))
        return mixed


class Patches(nn.Module):
    """Cuts images into patches of 4 x 4 and adds positions."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(16, WIDTH))

    def forward(self, pixels: Tensor) -> Tensor:
        patches: Tensor = self.cut(pixels).flatten(2).transpose(1, 2)
        return patches + self.positions


class Mixing(nn.Module):
    """Three projections of the normalised stream are mixed over time, and added to it."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.out(self.mix(*self.project(self.norm(x)).chunk(3, dim=-1)))
        return x + mixed


def state_space(value: Tensor, decay: Tensor, gate: Tensor) -> Tensor:
    """Mix by a gated linear recurrence over time with an input-dependent decay."""
    decay = torch.sigmoid(decay)
    state = torch.zeros_like(value[:, 0])
    states = []
    for step in range(value.shape[1]):
        state = decay[:, step] * state + (1 - decay[:, step]) * value[:, step]
        states.append(state)
    return torch.stack(states, dim=1) * functional.silu(gate)


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Mix by attention with a positive feature map, without a softmax."""
    query, key = functional.elu(query) + 1, functional.elu(key) + 1
    memory = key.transpose(1, 2) @ value
    scale = query @ key.sum(dim=1).unsqueeze(-1)
    return query @ memory / scale


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut.

    Source: He et al. 2015 (arXiv:1512.03385), figure 2.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norms[0](self.convs[0](x)))
        return functional.relu(self.norms[1](self.convs[1](inner)) + x)


def _encoder(num_layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)


def _gpt(layers: int, width: int, seq_length: int, **changes: Any) -> GPTConfig:
    shape = GPTConfig(
        vocab_size=BYTES_VOCAB_SIZE,
        seq_length=seq_length,
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=width // min(64, width // 4),
    )
    return replace(shape, **changes)


def _residual_net() -> nn.Module:
    stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
    body = nn.Sequential(stem, *[ResidualBlock(16) for _ in range(3)])
    return Classifier(nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 16)


def _stack(layer: Callable[[], nn.Module], num_layers: int) -> nn.Module:
    return nn.Sequential(*[layer() for _ in range(num_layers)])


def _mixing(mix: Callable[[Tensor, Tensor, Tensor], Tensor], num_layers: int) -> nn.Module:
    return TokenModel(_stack(partial(Mixing, mix), num_layers))


def architectures() -> Iterator[Workload]:
    shape = _gpt(4, WIDTH, TOKENS, vocab_size=VOCABULARY)
    yield _workload("gpt", "GPT-2 style", partial(GPT, shape))
    yield _workload("llama", "Llama style", partial(GPT, replace(shape, **_LLAMA)))
    yield _workload("encoder", "BERT style", lambda: TokenModel(_encoder(4)))
    yield _workload("translator", "encoder and decoder, T5 style", Translator)
    yield _workload("experts", "mixture of experts", lambda: TokenModel(_stack(MixtureLayer, 3)))
    yield _workload("mixer", "MLP-mixer", lambda: Classifier(_stack(MixerLayer, 4)), series)
    yield _workload(
        "vision",
        "vision transformer",
        lambda: Classifier(nn.Sequential(Patches(), _encoder(3))),
        images,
    )
    yield _workload("conv", "residual conv net", _residual_net, images)
    yield _workload(
        "lstm", "LSTM", lambda: Classifier(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)), series
    )
    yield _workload(
        "gru", "GRU", lambda: Classifier(nn.GRU(WIDTH, WIDTH, 2, batch_first=True)), series
    )
    yield _workload("state-space", "state space", lambda: _mixing(state_space, 2))
    yield _workload(
        "linear-attention", "attention without softmax", lambda: _mixing(linear_attention, 4)
    )


def _workload(
    name: str,
    description: str,
    make: Callable[[], nn.Module],
    batch: Callable[[torch.Generator, int], Batch] = tokens,
) -> Workload:
    num_items = TOKENS if batch is tokens else 1
    return Workload(f"zoo-{name}", f"{description}, width {WIDTH}", make, ROWS, num_items, batch)


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


def workloads() -> Iterator[Workload]:
    llama = {**_LLAMA, "untie_embeddings_and_output_weights": True, "disable_bias_linear": True}
    yield _text("gpt-tiny", "GPT-2 style, 4 layers, width 64", _gpt(4, 64, 32), 4)
    yield _text("gpt-3m", "GPT-2 style, 4 layers, width 256", _gpt(4, 256, 128), 8)
    yield _text("gpt-11m", "GPT-2 style, 6 layers, width 384", _gpt(6, 384, 128), 8)
    yield _text("gpt2-124m", "GPT-2's smallest", _preset("gpt2-124m", 1024), 8)
    yield _text("gpt2-355m", "GPT-2 medium", _preset("gpt2-355m", 1024), 4)
    yield _text("llama-tiny", "Llama style, 4 layers, width 64", _gpt(4, 64, 32, **llama), 4)
    yield _text("llama-4m", "Llama style, 4 layers, width 256", _gpt(4, 256, 128, **llama), 8)
    yield _text("llama-160m", "Llama style, 12 layers", _preset("llama-160m", 1024), 8)
    yield _text("llama-1b", "Llama style, 22 layers", _preset("llama-1b", 1024), 4)
    yield from architectures()


def _preset(name: str, seq_length: int) -> GPTConfig:
    return replace(find_preset(name).gpt(), seq_length=seq_length)


def _text(name: str, description: str, config: GPTConfig, batch_size: int) -> Workload:
    return Workload(name, description, partial(GPT, config), batch_size, config.seq_length)


def find_workload(name: str) -> Workload:
    return {workload.name: workload for workload in workloads()}[name]


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
        "zoo": tuple(Case(each.name, "fp32", ROWS, _QUICK) for each in architectures()),
    }
)


def batch_source(case: Case, device: torch.device, ranks: Ranks) -> Callable[[int], Batch]:
    """Return what makes the batch of a step: another one each time, for every contender the same.

    It depends on step and rank alone.
    """
    rows, random = case.batch_size, case.workload.batch
    if random is None:
        together = rows * ranks.size
        text = TokenBatches(
            load_corpus(None),
            seq_length=case.workload.items_per_sample,
            batch_size=together,
            seed=SEED,
            rank=ranks.rank,
            num_ranks=ranks.size,
        )

    def make(step: int) -> Batch:
        if random is None:
            made = text.batch(step * together)
        else:
            number = int(np.random.default_rng((SEED, step, ranks.rank)).integers(2**62))
            made = random(torch.Generator().manual_seed(number), rows)
        return tuple(tensor.to(device) for tensor in made)

    return make
