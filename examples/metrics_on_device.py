"""Log every step, and let the host wait for the device once in 50 steps.

``loss.item()`` in each step would wait in each step. Here a step's metrics become a row of a tensor
on the device, and the rows are read together.
"""

import torch
from torch import nn

import graphfsdp
from graphfsdp.optim import FusedAdam

NUM_ROWS = 50

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 1)).to(device)
optimizer = FusedAdam(model.parameters(), lr=1e-2)


def loss_fn(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


metrics = torch.zeros(NUM_ROWS, 2, device=device)
with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, max_grad_norm=1.0) as step:
    for iteration in range(200):
        inputs = torch.rand(256, 2, device=device) * 6 - 3
        loss = step(inputs, inputs.sin().prod(dim=1, keepdim=True))
        assert step.grad_norm is not None  # a limit is given
        metrics[iteration % NUM_ROWS] = torch.stack([loss, step.grad_norm])  # nobody waits
        if (iteration + 1) % NUM_ROWS == 0:
            first = iteration + 2 - NUM_ROWS
            for number, (value, norm) in enumerate(metrics.tolist(), first):  # one wait
                print(f"iteration {number}  loss {value:.4f}  grad norm {norm:.4f}")
