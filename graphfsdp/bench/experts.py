"""A GPT whose feed-forward layers are mixtures of experts, of which each token meets two.

Shapes: B = sequences, T = tokens of a sequence, C = hidden size, V = vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphfsdp.moe import MoE
from graphfsdp.training.gpt import GPT, INIT_STD, Block, GPTConfig, token_loss

_TOPK = 2
_BALANCE = 0.01  # weight of the loss that keeps experts equally busy, over all layers


@dataclass(frozen=True)
class ExpertConfig(GPTConfig):
    num_experts: int = 8


class ExpertBlock(Block):
    def __init__(self, config: ExpertConfig) -> None:
        super().__init__(config)
        self.ffn = MoE(  # type: ignore[assignment]  # which returns its auxiliary loss besides
            config.hidden_size,
            config.ffn_size,
            config.num_experts,
            topk=_TOPK,
            swiglu=config.swiglu,
            aux_loss_coeff=_BALANCE / config.num_layers,
            init_std=INIT_STD,
            down_init_std=INIT_STD / math.sqrt(config.num_branches),
        )

    def forward(  # type: ignore[override]
        self,
        x: Tensor,  # [B, T, C]
    ) -> tuple[Tensor, Tensor]:  # [B, T, C], [] auxiliary loss
        """Capture: no host sync."""
        x = x + self.attention(self.attention_norm(x))
        mixed, aux_loss = self.ffn(self.ffn_norm(x))
        return x + mixed, aux_loss


class ExpertGPT(GPT):
    def __init__(self, config: ExpertConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(ExpertBlock(config) for _ in range(config.num_layers))

    @property
    def num_idle_weights(self) -> int:
        """Weights of experts that a token does not meet."""
        experts = [param for name, param in self.named_parameters() if ".experts." in name]
        return sum((param.shape[0] - _TOPK) * param.shape[1:].numel() for param in experts)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,  # [B, T] int64
        targets: Tensor,  # [B, T] int64
    ) -> Tensor:  # [] float32 loss
        """Capture: no host sync."""
        x = self.embed(tokens)
        aux_losses = []
        for block in self.blocks:
            x, aux_loss = block(x)
            aux_losses.append(aux_loss)
        loss = token_loss(self.output(self.final_norm(x)), targets)
        return loss + torch.stack(aux_losses).sum()
