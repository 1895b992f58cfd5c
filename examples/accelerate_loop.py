"""A Hugging Face Accelerate loop whose whole iteration is one graph.

    pip install accelerate && python examples/accelerate_loop.py [full_iteration | none]

``prepare`` is as ever; ``accelerator.backward``, ``optimizer.step``, ``scheduler``'s gating and
``zero_grad`` give way to one call. Gradient accumulation is ``microbatches=`` of capture. With
several processes leave the model out of ``prepare`` and use graphfsdp.fully_shard.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import graphfsdp
from graphfsdp.optim import FusedAdam

scope = sys.argv[1] if len(sys.argv) > 1 else "full_iteration"
torch.manual_seed(0)
inputs = torch.rand(1024, 2) * 6 - 3
data = TensorDataset(inputs, inputs.sin().prod(dim=1, keepdim=True))

model: nn.Module = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Dropout(0.02), nn.Linear(128, 1))
optimizer: torch.optim.Optimizer = FusedAdam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=36 * 16)
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)

accelerator = Accelerator()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

with graphfsdp.capture(
    model, optimizer, loss_fn=lambda m, x, y: nn.functional.mse_loss(m(x), y), scope=scope
) as step:
    for epoch in range(36):
        for x, y in loader:
            loss = step(x, y)
            scheduler.step()
        if epoch % 6 == 5:
            print(f"epoch {epoch + 1}  loss {loss:.4f}  ({step.phase.value})")
