"""The smallest training loop whose whole iteration is one graph."""

import torch
from torch import nn

import graphfsdp
from graphfsdp.optim import FusedAdam

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 1)).to(device)
optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)


def loss_fn(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, max_grad_norm=1.0) as step:
    for iteration in range(500):
        inputs = torch.rand(256, 2, device=device) * 6 - 3
        targets = inputs.sin().prod(dim=1, keepdim=True)
        loss = step(inputs, targets)  # 3 eager warm-up iterations, then one launch per call
        scheduler.step()
        if iteration % 100 == 99:
            print(f"iteration {iteration + 1}  loss {loss:.4f}  ({step.phase.value})")
