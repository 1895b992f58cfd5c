"""Rotary position embedding.

Shapes: B = sequences, T = tokens of a sequence, H = heads, D = channels of a head.
"""

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Rotates each pair of channels of a query or key by an angle that grows with the position.

    Source: Su et al. 2021, section 3.2 (arXiv:2104.09864); pairs are (d, d + D/2).
    """

    cos: Tensor  # [T, D] float32
    sin: Tensor  # [T, D] float32, first half negated

    def __init__(self, *, head_size: int, seq_length: int, base: float) -> None:
        """Make the tables.

        Args:
            head_size: D, even.
            seq_length: T, of the longest sequence.
            base: The longest wavelength, in tokens, over 2 pi.
        """
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
        """Rotate queries or keys.

        Capture: no host sync; the tables are read at fixed addresses.
        """
        seq_length, half = x.shape[2], x.shape[3] // 2
        wide = x.float()  # bf16 angles would be off by several degrees
        swapped = torch.cat([wide[..., half:], wide[..., :half]], dim=-1)
        return (wide * self.cos[:seq_length] + swapped * self.sin[:seq_length]).to(x.dtype)
