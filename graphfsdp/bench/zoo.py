"""Twelve small architectures whose kernels are so short that calling them is what costs.

Four rows of width 32 are a usual batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphfsdp.data import Batch
from graphfsdp.training.gpt import GPT, GPTConfig

WIDTH = 32
TOKENS = 16
ROWS = 4
VOCABULARY = 64


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


def _gpt(**changes: str | bool) -> GPT:
    shape = {"seq_length": TOKENS, "num_layers": 4, "hidden_size": WIDTH, "num_attention_heads": 4}
    return GPT(GPTConfig(vocab_size=VOCABULARY, **shape, **changes))  # type: ignore[arg-type]


def _residual_net() -> nn.Module:
    stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
    body = nn.Sequential(stem, *[ResidualBlock(16) for _ in range(3)])
    return Classifier(nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 16)


def _stack(layer: Callable[[], nn.Module], num_layers: int) -> nn.Module:
    return nn.Sequential(*[layer() for _ in range(num_layers)])


def architectures() -> Iterator[Workload]:
    yield _workload("gpt", "GPT-2 style", _gpt)
    yield _workload(
        "llama",
        "Llama style",
        lambda: _gpt(position_embedding_type="rope", normalization="RMSNorm", swiglu=True),
    )
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
    yield _workload(
        "state-space",
        "state space",
        lambda: TokenModel(_stack(partial(Mixing, state_space), 2)),
    )
    yield _workload(
        "linear-attention",
        "attention without softmax",
        lambda: TokenModel(_stack(partial(Mixing, linear_attention), 4)),
    )


def _workload(
    name: str,
    description: str,
    make: Callable[[], nn.Module],
    batch: Callable[[torch.Generator, int], Batch] = tokens,
) -> Workload:
    num_items = TOKENS if batch is tokens else 1
    return Workload(f"zoo-{name}", f"{description}, width {WIDTH}", make, ROWS, num_items, batch)
