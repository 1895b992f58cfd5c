"""Which experts take a token, by scores that are learned, and what keeps them equally busy."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from graphfsdp.base.collectives import all_reduce_
from graphfsdp.base.torch_internals import is_in_backward
from graphfsdp.config import at_least
from graphfsdp.errors import ConfigError

ScoreFunction = Literal["softmax", "sigmoid"]


class Router(nn.Module):
    """Chooses the ``topk`` experts with the highest scores for each token, in float32.

    Two ways of balancing, alone or together. The auxiliary loss is of each sequence, so that its
    mean does not depend on how sequences are cut over ranks and microbatches. The bias moves the
    choice alone, never the weights: once an iteration it rises by ``bias_update_rate`` for experts
    that had fewer tokens than the mean of all ranks, and falls for those that had more.

    Sources: DeepSeek-AI 2024 (arXiv:2412.19437), equations 12 to 20; Wang et al. 2024
    (arXiv:2408.15664) for the bias; Fedus et al. 2021 (arXiv:2101.03961) for the loss.

    Attributes:
        expert_bias: [E] float32.
        tokens_per_expert: [E] int64, tokens of this rank that have chosen each expert in training
            so far; not in checkpoints.
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor
    _counted: Tensor  # what the bias has seen of them

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        topk: int = 2,
        score_function: ScoreFunction = "softmax",
        aux_loss_coeff: float = 0.0,
        bias_update_rate: float = 0.0,
        balance_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Draw the weights as ``nn.Linear`` does; see ``MoE`` for the arguments."""
        super().__init__()
        at_least("num_experts", num_experts, 1)
        at_least("topk", topk, 1)
        if topk > num_experts:
            raise ConfigError(f"topk must be at most num_experts {num_experts}, got {topk}")
        if score_function not in get_args(ScoreFunction):
            known = " or ".join(repr(name) for name in get_args(ScoreFunction))
            raise ConfigError(f"score_function must be {known}, got {score_function!r}")
        for name, value in (
            ("aux_loss_coeff", aux_loss_coeff),
            ("bias_update_rate", bias_update_rate),
        ):
            if not value >= 0:
                raise ConfigError(f"{name} must be at least 0, got {value!r}")
        self.topk = topk
        self.score_function = score_function
        self.aux_loss_coeff = aux_loss_coeff
        self.bias_update_rate = bias_update_rate
        self._group = balance_group
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(num_experts))
        for name in ("tokens_per_expert", "_counted"):
            zeros = torch.zeros(num_experts, dtype=torch.int64)
            self.register_buffer(name, zeros, persistent=False)

    def reset_parameters(self) -> None:
        """Set the buffers to zero, where they are; the gate is a module of its own."""
        for buffer in (self.expert_bias, self.tokens_per_expert, self._counted):
            buffer.zero_()

    def forward(
        self,
        x: Tensor,  # [B, T, C]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return weights [B T, K], experts [B T, K] int64, counts [E] int64 and auxiliary loss [].

        A token's weights are its scores of the chosen experts, with sum 1 if these are several.

        Capture: no host sync; counts are added on the device, in training alone.
        """
        num_sequences, num_experts = x.shape[0], self.expert_bias.numel()
        wide = torch.promote_types(x.dtype, torch.float32)
        with _in_full(x.device):
            logits = F.linear(x.to(wide), self.gate.weight.to(wide))  # [B, T, E]
        is_softmax = self.score_function == "softmax"
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        experts = (scores.detach() + self.expert_bias).topk(self.topk, dim=-1).indices  # [B, T, K]
        weights = scores.gather(-1, experts)
        if self.topk > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = experts.view(num_sequences, -1)
        counts = torch.zeros(num_sequences, num_experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(1, chosen, torch.ones_like(chosen))
        shares = scores if is_softmax else scores / scores.sum(-1, keepdim=True)
        busy = counts * (num_experts / max(chosen.shape[1], 1))  # 1 where all are equally busy
        aux_loss = self.aux_loss_coeff * (busy * shares.mean(1)).sum(-1).mean()
        totals = counts.sum(0)
        if counts_now(self):
            self.tokens_per_expert.add_(totals)
        return weights.flatten(0, 1), experts.flatten(0, 1), totals, aux_loss

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias by what was chosen since the last call; a collective, if it moves.

        Capture: no host sync. ``graphfsdp.capture`` calls it once an iteration.
        """
        if not self.bias_update_rate:
            return
        load = self.tokens_per_expert - self._counted
        self._counted.copy_(self.tokens_per_expert)
        if dist.is_initialized():
            group = self._group or dist.group.WORLD
            assert group is not None
            all_reduce_(load, group, reduction="sum")
        # In whole numbers: a mean of large counts would be rounded.
        missing = load.sum() - load * load.numel()
        self.expert_bias.add_(missing.sign(), alpha=self.bias_update_rate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.expert_bias.dtype != torch.float32:  # else small steps would be rounded away
            self.expert_bias = self.expert_bias.float()
        return self


def counts_now(module: nn.Module) -> bool:
    """Tell whether a forward pass counts: in training, once.

    Within a backward pass torch's checkpoints run one again.
    """
    return module.training and not is_in_backward()


def _in_full(device: torch.device) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
