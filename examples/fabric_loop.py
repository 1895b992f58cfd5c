"""A Lightning Fabric loop whose whole iteration is one graph.

    pip install lightning && python examples/fabric_loop.py [full_iteration | none]

``setup`` is as ever; ``fabric.backward``, ``optimizer.step`` and ``zero_grad`` give way to one
call. With several processes leave the model out of ``setup`` and use graphfsdp.fully_shard.
"""

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import graphfsdp
from graphfsdp.optim import FusedAdam

scope = sys.argv[1] if len(sys.argv) > 1 else "full_iteration"
fabric = Fabric(devices=1)
torch.manual_seed(0)
inputs = torch.rand(1024, 2) * 6 - 3
data = TensorDataset(inputs, inputs.sin().prod(dim=1, keepdim=True))

net = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Dropout(0.02), nn.Linear(128, 1))
model, optimizer = fabric.setup(net, FusedAdam(net.parameters(), lr=1e-2))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=64, shuffle=True, drop_last=True))

with graphfsdp.capture(
    model, optimizer, loss_fn=lambda m, x, y: nn.functional.mse_loss(m(x), y), scope=scope
) as step:
    for epoch in range(36):
        for x, y in loader:
            loss = step(x, y)
        if epoch % 6 == 5:
            print(f"epoch {epoch + 1}  loss {loss:.4f}  ({step.phase.value})")
