"""A mixture of experts in one graph: which expert has how many tokens never leaves the device.

Each token of this task belongs to one of eight groups, and each group has a rotation of its own to
be learned. A loop over experts would ask the host for the sizes, and be refused.
"""

import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.moe import MoE
from graphfsdp.optim import FusedAdam

WIDTH, NUM_GROUPS, TOKENS = 16, 8, 64
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, 64, num_experts=8, topk=2, aux_loss_coeff=1e-2, bias_update_rate=1e-3)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # [B, T, WIDTH] each
        mixed, aux_loss = self.moe(self.norm(x))
        error = nn.functional.mse_loss(x + mixed, targets)
        return error + aux_loss, error  # the loss, and what is returned beside it


rotations = torch.linalg.qr(torch.randn(NUM_GROUPS, WIDTH, WIDTH)).Q.to(device)
marks = torch.randn(NUM_GROUPS, WIDTH, device=device)  # what a token's group is seen by
model = Model().to(device)
optimizer = FusedAdam(model.parameters(), lr=3e-3)

with graphfsdp.capture(model, optimizer, max_grad_norm=1.0) as step:
    for iteration in range(300):
        groups = torch.randint(NUM_GROUPS, (8, TOKENS), device=device)
        x = marks[groups] + 0.1 * torch.randn(8, TOKENS, WIDTH, device=device)
        targets = (x.unsqueeze(-2) @ rotations[groups]).squeeze(-2)
        _, error = step(x, targets)
        if iteration % 100 == 99:
            print(f"iteration {iteration + 1}  error {error:.4f}  ({step.phase.value})")
