"""Twelve small architectures whose kernels are so short that calling them is what costs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import gpt
from graphfsdp.training.gpt import GPT, GPTConfig

WIDTH = 32
TOKENS = 16
ROWS = 4
VOCABULARY = 64

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Architecture:
    """A model that returns its loss, and what to feed it."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


def tokens(generator: torch.Generator) -> Batch:
    """Return ids and targets, [ROWS, TOKENS] int64 each."""
    ids = torch.randint(VOCABULARY, (2, ROWS, TOKENS), generator=generator)
    return ids[0], ids[1]


def images(generator: torch.Generator) -> Batch:
    """Return [ROWS, 3, 16, 16] float32 images and [ROWS] int64 classes."""
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return pixels, torch.randint(10, (ROWS,), generator=generator)


def features(generator: torch.Generator) -> Batch:
    """Return [ROWS, TOKENS, WIDTH] float32 series and [ROWS] int64 classes."""
    series = torch.randn(ROWS, TOKENS, WIDTH, generator=generator)
    return series, torch.randint(10, (ROWS,), generator=generator)


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
    """Embeddings, a body, and logits for every position."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = body
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.body(self.embedding(ids)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Translator(nn.Module):
    """An encoder and a decoder with cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
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
        combine = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, weights)
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=-2)
        return x + (combine.unsqueeze(-1) * outputs).sum(dim=-2)


class MixerLayer(nn.Module):
    """Mixes tokens, then channels."""

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


class Residual(nn.Module):
    """Two convolutions with batch norm beside the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norms[0](self.convs[0](x)).relu()
        out: Tensor = (x + self.norms[1](self.convs[1](hidden))).relu()
        return out


class StateSpace(nn.Module):
    """A gated linear recurrence over time with an input-dependent decay."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, decay, gate = self.project(self.norm(x)).chunk(3, dim=-1)
        decay = torch.sigmoid(decay)
        state = torch.zeros_like(value[:, 0])
        states = []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + (1 - decay[:, step]) * value[:, step]
            states.append(state)
        hidden: Tensor = x + self.out(torch.stack(states, dim=1) * functional.silu(gate))
        return hidden


class LinearAttention(nn.Module):
    """Attention by a positive feature map, without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(self.norm(x)).chunk(3, dim=-1)
        query, key = functional.elu(query) + 1, functional.elu(key) + 1
        memory = key.transpose(1, 2) @ value
        scale = query @ key.sum(dim=1).unsqueeze(-1)
        hidden: Tensor = x + self.out(query @ memory / scale)
        return hidden


def _encoder(num_layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)


def _config(**changes: object) -> GPTConfig:
    from dataclasses import replace

    return replace(gpt(4, WIDTH, TOKENS, VOCABULARY), **changes)  # type: ignore[arg-type]


def _residual_net() -> nn.Module:
    stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
    body = nn.Sequential(stem, *[Residual(16) for _ in range(3)])
    return Classifier(nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 16)


def architectures() -> dict[str, Architecture]:
    """Return all of them by name."""
    llama = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}
    return {
        "gpt": Architecture(lambda: GPT(_config()), tokens),
        "llama": Architecture(lambda: GPT(_config(**llama)), tokens),
        "encoder (BERT)": Architecture(lambda: TokenModel(_encoder(4)), tokens),
        "encoder-decoder (T5)": Architecture(Translator, tokens),
        "mixture of experts": Architecture(
            lambda: TokenModel(nn.Sequential(*[MixtureLayer() for _ in range(3)])), tokens
        ),
        "MLP-mixer": Architecture(
            lambda: Classifier(nn.Sequential(*[MixerLayer() for _ in range(4)])), features
        ),
        "vision transformer": Architecture(
            lambda: Classifier(nn.Sequential(Patches(), _encoder(3))), images
        ),
        "residual conv net": Architecture(_residual_net, images),
        "LSTM": Architecture(
            lambda: Classifier(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)), features
        ),
        "GRU": Architecture(
            lambda: Classifier(nn.GRU(WIDTH, WIDTH, 2, batch_first=True)), features
        ),
        "state space": Architecture(
            lambda: TokenModel(nn.Sequential(*[StateSpace() for _ in range(2)])), tokens
        ),
        "linear attention": Architecture(
            lambda: TokenModel(nn.Sequential(*[LinearAttention() for _ in range(4)])), tokens
        ),
    }
