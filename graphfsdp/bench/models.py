"""Models of the benchmark beside the trainer's GPT: BERT, a residual net.

Every model has its layers in ``blocks`` and returns its loss.

Shapes: B = sequences or images, T = tokens of a sequence, P = masked places of a sequence,
C = hidden size or channels, S = side of an image.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

# Share of the tokens that BERT predicts, as in MLPerf's: 76 of 512.
MASKED_SHARE = 0.15
# Tokens that text does not have: behind those of the corpus.
NUM_SPECIAL = 3
NUM_COLOURS = 3
NUM_STAGES = 3


@dataclass(frozen=True)
class BertConfig:
    """The shape of the model; the vocabulary ends with [CLS], [SEP] and [MASK]."""

    vocab_size: int
    seq_length: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    init_std: float = 0.02

    @property
    def num_masked(self) -> int:
        """Places of a sequence that are predicted, P."""
        return max(1, int(self.seq_length * MASKED_SHARE))


class EncoderBlock(nn.Module):
    """Attention to all tokens, then feed-forward; normalised after each sum.

    Source: Devlin et al. 2018 (arXiv:1810.04805).
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.ffn_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, C]
        batch, seq_length, width = x.shape
        qkv = self.qkv(x).view(batch, seq_length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()  # each [B, H, T, C / H]
        mixed = F.scaled_dot_product_attention(query, key, value)
        mixed = mixed.transpose(1, 2).reshape(batch, seq_length, width)
        x = self.attention_norm(x + self.out(mixed))
        done: Tensor = self.ffn_norm(x + self.down(F.gelu(self.up(x))))
        return done


class BertModel(nn.Module):
    """The encoder with both heads of pre-training; returns the sum of their losses."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, width)
        self.position_embedding = nn.Embedding(config.seq_length, width)
        self.segment_embedding = nn.Embedding(2, width)
        self.embedding_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, config.vocab_size)
        self.output.weight = self.token_embedding.weight
        self.pooler = nn.Linear(width, width)
        self.follows = nn.Linear(width, 2)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.init_std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,  # [B, T] int64, some of them masked
        segments: Tensor,  # [B, T] int64, 0 in the first half, 1 in the second
        places: Tensor,  # [B, P] int64, which tokens to predict
        targets: Tensor,  # [B, P] int64, what they were
        follows: Tensor,  # [B] int64, 1 where the second half is what followed the first
    ) -> Tensor:  # [] float32, nats per masked token and per sequence
        # Capture: the number of masked places is the same in every batch.
        x = self.token_embedding(tokens) + self.segment_embedding(segments)
        x = self.embedding_norm(x + self.position_embedding.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        index = places[:, :, None].expand(-1, -1, x.shape[2])
        hidden = self.transform_norm(F.gelu(self.transform(x.gather(1, index))))
        logits = self.output(hidden).float().flatten(0, 1)
        masked_loss: Tensor = F.cross_entropy(logits, targets.flatten())
        pooled = torch.tanh(self.pooler(x[:, 0]))
        order_loss: Tensor = F.cross_entropy(self.follows(pooled).float(), follows)
        return masked_loss + order_loss


@dataclass(frozen=True)
class ConvConfig:
    """``channels`` are of the first stage; each of the two later ones has twice as many."""

    channels: int
    blocks_per_stage: int
    num_classes: int = 10
    image_size: int = 32


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut.

    Source: He et al. 2015 (arXiv:1512.03385), figure 2.
    """

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        stride = 1 if num_in == num_out else 2
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        self.shortcut = None if stride == 1 else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, S, S] -> [B, C or 2 C, S or S / 2, S or S / 2]
        inner = F.relu(self.norm1(self.conv1(x)))
        short = x if self.shortcut is None else self.shortcut(x)
        return F.relu(self.norm2(self.conv2(inner)) + short)


class ConvNet(nn.Module):
    """A stem, three stages of residual blocks, and a linear layer; returns its loss."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.config = config
        width = config.channels
        self.stem = nn.Conv2d(NUM_COLOURS, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        blocks = []
        for stage in range(NUM_STAGES):
            for index in range(config.blocks_per_stage):
                after = 2 * width if stage > 0 and index == 0 else width
                blocks.append(ResidualBlock(width, after))
                width = after
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, config.num_classes)

    def forward(
        self,
        images: Tensor,  # [B, 3, S, S] float32
        classes: Tensor,  # [B] int64
    ) -> Tensor:  # [] float32, nats per image
        x = F.relu(self.stem_norm(self.stem(images.to(self.stem.weight.dtype))))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean(dim=(2, 3)))
        loss: Tensor = F.cross_entropy(logits.float(), classes)
        return loss
