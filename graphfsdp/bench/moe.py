"""A decoder whose feed-forward layers are mixtures of experts with a static capacity.

Shapes: B = sequences, T = tokens of a sequence, N = B T, C = hidden size, F = expert's width,
E = experts, K = experts per token, S = places of an expert.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from graphfsdp.training.gpt import Attention, GPTConfig


@dataclass(frozen=True)
class MoEConfig:
    """The shape of the model.

    Attributes:
        gpt: Everything but the experts; its feed-forward width is that of one expert.
        num_experts: Experts of each layer.
        experts_per_token: How many of them each token is sent to.
        capacity_factor: Places of an expert, over its fair share of the tokens. An expert that is
            full drops tokens, so that every shape is known beforehand.
        balance_weight: Weight of the loss that asks for equal use of the experts.
    """

    gpt: GPTConfig
    num_experts: int = 8
    experts_per_token: int = 2
    capacity_factor: float = 1.25
    balance_weight: float = 0.01

    def capacity(self, num_tokens: int) -> int:
        """Return the places of one expert for that many tokens."""
        share = num_tokens * self.experts_per_token / self.num_experts
        return min(num_tokens, math.ceil(share * self.capacity_factor))


class ExpertLayer(nn.Module):
    """Sends each token to a few experts, each a feed-forward layer of its own.

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), section 2.2, and Fedus et al. 2021
    (arXiv:2101.03961), equations 4 to 6, for the loss that balances.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        width, inner = config.gpt.hidden_size, config.gpt.ffn_size
        self.config = config
        self.router = nn.Linear(width, config.num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.num_experts, width, inner))
        self.down = nn.Parameter(torch.empty(config.num_experts, inner, width))
        self.register_buffer("numbers", torch.arange(config.num_experts), persistent=False)

    def forward(
        self,
        x: Tensor,  # [B, T, C]
    ) -> tuple[Tensor, Tensor]:  # [B, T, C]; [] float32, the balancing loss
        """Transform each token by its experts; a token that all of them drop becomes zero.

        Capture: no host sync; all shapes follow from those of the input.
        """
        tokens = x.flatten(0, 1)  # [N, C]
        num_tokens, width = tokens.shape
        config, places = self.config, self.config.capacity(num_tokens)
        shares = self.router(tokens).float().softmax(dim=-1)  # [N, E]
        weights, experts = shares.topk(config.experts_per_token, dim=-1)  # [N, K]
        # All first choices come before all second ones, so that they get the places first.
        chosen = experts.t().flatten()[:, None] == self.numbers  # [K N, E]
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)  # [K N]
        kept = place < places
        num_slots = config.num_experts * places
        slot = torch.where(kept, experts.t().flatten() * places + place, num_slots)
        sent = tokens.repeat(config.experts_per_token, 1)  # [K N, C]
        # The place after the last one takes what is dropped.
        filled = tokens.new_zeros(num_slots + 1, width).index_copy(0, slot, sent)
        hidden = F.gelu(filled[:-1].view(config.num_experts, places, width).bmm(self.up))
        done = hidden.bmm(self.down).view(num_slots, width)
        done = torch.cat([done, done.new_zeros(1, width)])
        weights = (weights / weights.sum(-1, keepdim=True)).t().flatten().to(x.dtype)
        mixed = (done.index_select(0, slot) * weights[:, None]).view(-1, num_tokens, width).sum(0)
        used = chosen[:num_tokens].float().mean(0)  # share of first choices, by expert
        balance = config.num_experts * (used * shares.mean(0)).sum()
        return mixed.view_as(x), balance


class MoEBlock(nn.Module):
    """Attention, then experts, each on a normalised copy and added to the stream."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.gpt.hidden_size, eps=1e-5)
        self.attention = Attention(config.gpt)
        self.expert_norm = nn.RMSNorm(config.gpt.hidden_size, eps=1e-5)
        self.experts = ExpertLayer(config)

    def forward(
        self,
        x: Tensor,  # [B, T, C]
    ) -> tuple[Tensor, Tensor]:  # [B, T, C]; [] float32
        """Run one layer.

        Capture: no host sync.
        """
        x = x + self.attention(self.attention_norm(x))
        mixed, balance = self.experts(self.expert_norm(x))
        return x + mixed, balance


class MoEModel(nn.Module):
    """A decoder-only transformer with mixtures of experts; returns its loss."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.gpt.vocab_size, config.gpt.hidden_size)
        self.blocks = nn.ModuleList(MoEBlock(config) for _ in range(config.gpt.num_layers))
        self.final_norm = nn.RMSNorm(config.gpt.hidden_size, eps=1e-5)
        self.output = nn.Linear(config.gpt.hidden_size, config.gpt.vocab_size, bias=False)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=config.gpt.init_std)

    def forward(
        self,
        tokens: Tensor,  # [B, T] int64
        targets: Tensor,  # [B, T] int64
    ) -> Tensor:  # [] float32, nats per token, and the balancing loss
        """Predict the next token at each position.

        Capture: no host sync.
        """
        x = self.token_embedding(tokens)
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        logits = self.output(self.final_norm(x)).float().flatten(0, 1)
        loss: Tensor = F.cross_entropy(logits, targets.flatten())
        return loss + self.config.balance_weight * torch.stack(balances).mean()
