"""The experts of this rank: feed-forward layers side by side."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from graphfsdp.config import at_least
from graphfsdp.errors import ConfigError
from graphfsdp.moe.grouped import grouped_mm


class Experts(nn.Module):
    """Feed-forward layers with GELU, or with SwiGLU; ``up`` and ``gate`` [L, C, F], ``down``.

    On several ranks it is the unit that ``fully_shard(..., expert_axis=...)`` takes: each rank
    holds other experts, and the checkpoints hold all.
    """

    gate: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        *,
        first: int = 0,
        num_local: int | None = None,
        swiglu: bool = True,
        init_std: float | None = None,
        down_init_std: float | None = None,
    ) -> None:
        """Draw the weights of all experts, one at a time, and keep those of this rank.

        Args:
            hidden_size: C.
            ffn_hidden_size: F.
            num_experts: On all ranks.
            first: Number of this rank's first one.
            num_local: How many this rank holds, L; all if not given.
            swiglu: ``silu(x gate) * (x up)``, not ``gelu(x up)``.
            init_std: Of the initial weights; if not given, 1 / sqrt(3 x the width that is summed
                over), that of ``nn.Linear``.
            down_init_std: Likewise of ``down``; ``init_std`` if not given.
        """
        super().__init__()
        self.num_experts, self.first = num_experts, first
        self.init_std, self.down_init_std = init_std, down_init_std
        num_local = num_experts if num_local is None else num_local
        for name, value in (("hidden_size", hidden_size), ("ffn_hidden_size", ffn_hidden_size)):
            at_least(name, value, 1)
        if not 0 <= first <= num_experts - num_local or num_local < 1:
            raise ConfigError(
                f"experts {first} to {first + num_local - 1} are not all of 0 to {num_experts - 1}"
            )
        wide = (num_local, hidden_size, ffn_hidden_size)
        self.gate = nn.Parameter(torch.empty(wide)) if swiglu else None
        self.up = nn.Parameter(torch.empty(wide))
        self.down = nn.Parameter(torch.empty(num_local, ffn_hidden_size, hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights; the same ones however many ranks share the experts."""
        down_std = self.init_std if self.down_init_std is None else self.down_init_std
        stds = (self.init_std, self.init_std, down_std)
        for weight, std in zip((self.gate, self.up, self.down), stds, strict=True):
            if weight is None:
                continue
            std = 1 / math.sqrt(3 * weight.shape[1]) if std is None else std
            for expert in range(self.num_experts):
                drawn = torch.empty_like(weight[0]).normal_(std=std)
                if self.first <= expert < self.first + weight.shape[0]:
                    weight[expert - self.first].copy_(drawn)

    def forward(
        self,
        rows: Tensor,  # [M, C] by expert, padding last
        ends: Tensor,  # [L] int32, the row behind the last one of each expert
        most: int,
    ) -> Tensor:  # [M, C]; padding has no defined values
        """Let each expert compute on its rows, of which it has at most ``most``.

        Capture: no host sync.
        """
        device = rows.device.type
        casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if casts else self.up.dtype
        rows = rows.to(dtype)
        inner = grouped_mm(rows, self.up.to(dtype), ends, most)
        if self.gate is None:
            inner = F.gelu(inner)
        else:
            inner = F.silu(grouped_mm(rows, self.gate.to(dtype), ends, most)) * inner
        return grouped_mm(inner, self.down.to(dtype), ends, most)
