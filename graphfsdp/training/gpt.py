"""A GPT, written for reading: pre-norm blocks, learned or rotary positions, GELU or SwiGLU.

Shapes: B = sequences, T = tokens of a sequence, C = hidden size, H = heads, D = C / H,
F = width of the feed-forward layer, V = vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from graphfsdp.errors import ConfigError

PositionEmbeddingType = Literal["learned_absolute", "rope"]
Normalization = Literal["LayerNorm", "RMSNorm"]
INIT_STD = 0.02  # of the initial weights


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT, by Megatron's names."""

    vocab_size: int
    seq_length: int  # of the longest sequence
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None  # heads of keys and values; None: one for each head
    ffn_hidden_size: int | None = None  # 4 x hidden size if None, or 8/3 x with swiglu
    position_embedding_type: PositionEmbeddingType = "learned_absolute"
    normalization: Normalization = "LayerNorm"
    swiglu: bool = False
    openai_gelu: bool = False  # GELU by its approximation with tanh, as GPT-2 has it
    untie_embeddings_and_output_weights: bool = False  # else the output matrix is the embedding's
    disable_bias_linear: bool = False
    hidden_dropout: float = 0.0  # after the embedding and after each branch
    attention_dropout: float = 0.0
    rotary_base: float = 10_000.0  # longest wavelength of rotary positions, over 2 pi

    def __post_init__(self) -> None:
        for name in (
            *("vocab_size", "seq_length", "num_layers", "hidden_size", "num_attention_heads"),
            "ffn_hidden_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                f"{self.num_attention_heads}; every head needs the same width, so change one"
            )
        groups = self.num_groups
        if groups < 1 or self.num_attention_heads % groups:
            raise ConfigError(
                f"num_query_groups {groups} does not divide num_attention_heads "
                f"{self.num_attention_heads}; each group serves equally many heads, so change one"
            )
        if self.position_embedding_type == "rope" and self.head_size % 2:
            raise ConfigError(
                f"position_embedding_type rope rotates pairs of channels, but a head has "
                f"{self.head_size} of them; change hidden_size or num_attention_heads"
            )
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_groups(self) -> int:
        groups = self.num_query_groups
        return self.num_attention_heads if groups is None else groups

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return 64 * math.ceil(8 * self.hidden_size / 3 / 64)
        return 4 * self.hidden_size


class RotaryEmbedding(nn.Module):
    """Rotates each pair of channels of a query or key by an angle that grows with the position.

    Source: Su et al. 2021, section 3.2 (arXiv:2104.09864); pairs are (d, d + D/2).
    """

    cos: Tensor  # [T, D] float32
    sin: Tensor  # [T, D] float32, first half negated

    def __init__(self, *, head_size: int, seq_length: int, base: float) -> None:
        super().__init__()
        self.base = base
        # Tables can be computed again, so a checkpoint need not hold them.
        self.register_buffer("cos", torch.empty(seq_length, head_size), persistent=False)
        self.register_buffer("sin", torch.empty(seq_length, head_size), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables, on the device where they are."""
        seq_length, half = self.cos.shape[0], self.cos.shape[1] // 2
        pairs = torch.arange(half, dtype=torch.float64, device=self.cos.device)
        positions = torch.arange(seq_length, dtype=torch.float64, device=self.cos.device)
        angles = positions[:, None] * self.base ** (-pairs / half)
        cos, sin = angles.cos().float(), angles.sin().float()
        self.cos.copy_(torch.cat([cos, cos], dim=-1))
        self.sin.copy_(torch.cat([-sin, sin], dim=-1))

    def forward(
        self,
        x: Tensor,  # [B, H, T, D] any float dtype
    ) -> Tensor:  # [B, H, T, D] same dtype
        """Capture: no host sync; the tables are read at fixed addresses."""
        seq_length, half = x.shape[2], x.shape[3] // 2
        cos, sin = self.cos[:seq_length], self.sin[:seq_length]
        wide = x.float()  # bf16 angles would be off by several degrees
        swapped = torch.cat([wide[..., half:], wide[..., :half]], dim=-1)
        return (wide * cos + swapped * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values.

    Source: Ainslie et al. 2023 (arXiv:2305.13245) for groups of queries that share keys.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        bias = not config.disable_bias_linear
        self.num_heads = config.num_attention_heads
        self.dropout = config.attention_dropout
        self.num_groups = config.num_groups
        width = config.head_size * (self.num_heads + 2 * self.num_groups)
        self.qkv = nn.Linear(config.hidden_size, width, bias=bias)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=bias)
        rope = config.position_embedding_type == "rope"
        self.rotary = (
            RotaryEmbedding(
                head_size=config.head_size, seq_length=config.seq_length, base=config.rotary_base
            )
            if rope
            else None
        )

    def forward(
        self,
        x: Tensor,  # [B, T, C]
    ) -> Tensor:  # [B, T, C]
        """Capture: no host sync; dropout draws from the device's default generator."""
        batch, seq_length, width = x.shape
        heads = (self.num_heads, self.num_groups, self.num_groups)
        qkv = self.qkv(x).view(batch, seq_length, sum(heads), width // self.num_heads)
        query, key, value = qkv.transpose(1, 2).split(heads, dim=1)  # each [B, heads, T, D]
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        dropout = self.dropout if self.training else 0.0
        shared = self.num_groups < self.num_heads
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=shared
        )
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq_length, width))
        return merged


class FeedForward(nn.Module):
    """Two linear layers with GELU between, or SwiGLU with a third as the gate.

    Source: Shazeer 2020 (arXiv:2002.05202) for SwiGLU.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        bias = not config.disable_bias_linear
        self.gate = (
            nn.Linear(config.hidden_size, config.ffn_size, bias=bias) if config.swiglu else None
        )
        self.approximate = "tanh" if config.openai_gelu else "none"
        self.up = nn.Linear(config.hidden_size, config.ffn_size, bias=bias)
        self.down = nn.Linear(config.ffn_size, config.hidden_size, bias=bias)

    def forward(
        self,
        x: Tensor,  # [B, T, C]
    ) -> Tensor:  # [B, T, C]
        """Capture: no host sync."""
        if self.gate is None:
            inner = F.gelu(self.up(x), approximate=self.approximate)
        else:
            inner = F.silu(self.gate(x)) * self.up(x)
        outer: Tensor = self.down(inner)
        return outer


def _make_norm(config: GPTConfig) -> nn.Module:
    if config.normalization == "RMSNorm":
        return nn.RMSNorm(config.hidden_size, eps=1e-5)
    return nn.LayerNorm(config.hidden_size, eps=1e-5)


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised copy and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = _make_norm(config)
        self.attention = Attention(config)
        self.ffn_norm = _make_norm(config)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        x: Tensor,  # [B, T, C]
    ) -> Tensor:  # [B, T, C]
        """Capture: no host sync; dropout draws from the device's default generator."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return x


class GPT(nn.Module):
    """A decoder-only transformer that returns its loss when it is given targets."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = (
            nn.Embedding(config.seq_length, config.hidden_size)
            if config.position_embedding_type == "learned_absolute"
            else None
        )
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = _make_norm(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if not config.untie_embeddings_and_output_weights:
            self.output.weight = self.token_embedding.weight
        for module in self.modules():
            self._init_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw a layer's normal weights; what writes into the residual stream starts smaller.

        ``graphfsdp.materialize`` calls it too, for modules that were built on the meta device.

        Source: Radford et al. 2019, section 2.3 (GPT-2): 1/sqrt(number of residual branches).
        """
        std = INIT_STD
        blocks = (block for block in self.blocks if isinstance(block, Block))
        if any(module in (block.attention.out, block.ffn.down) for block in blocks):
            std /= math.sqrt(2 * self.config.num_layers)
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,  # [B, T] int64
        targets: Tensor | None = None,  # [B, T] int64, the token that follows each one
    ) -> Tensor:  # [] float32 loss in nats per token, or [B, T, V] logits without targets
        """Capture: no host sync, no data-dependent shape; positions are a slice at a fixed address.

        Dropout draws from the device's default generator.
        """
        seq_length = tokens.shape[1]
        if seq_length > self.config.seq_length:
            raise ValueError(
                f"the sequence has {seq_length} tokens, the model was made for at most "
                f"{self.config.seq_length}; shorten it or make the model with a larger seq_length"
            )
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[:seq_length]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.final_norm(x))
        if targets is None:
            return logits
        # In float32 whatever the weights are: a softmax over V terms loses too much in bf16.
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def flops_per_token(self) -> int:
        """Return the matrix arithmetic that training needs per token: 6 N + 12 L C T.

        N counts the weights that take part in a matrix product: all but position vectors and, where
        the output layer has a matrix of its own, the token embedding. Recomputation never counts.

        Source: Chowdhery et al. 2022, appendix B (PaLM, arXiv:2204.02311).
        """
        config = self.config
        num_weights = sum(param.numel() for param in self.parameters())
        if self.position_embedding is not None:
            num_weights -= self.position_embedding.weight.numel()
        if config.untie_embeddings_and_output_weights:
            num_weights -= self.token_embedding.weight.numel()
        attention = 12 * config.num_layers * config.hidden_size * config.seq_length
        return 6 * num_weights + attention


def make_model(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> GPT:
    """Weights are drawn from torch's global generator."""
    # Drawn on the CPU, so that a seed means the same weights on every device.
    with torch.device("meta" if device.type == "meta" else "cpu"):
        model = GPT(config)
    # Parameters alone: buffers such as RoPE's tables stay in float32.
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model.to(device)
