"""Save while training, and go on from the last checkpoint, bit for bit, inside a live graph.

    python examples/checkpoint_and_resume.py [FOLDER]

Give the same command again after whatever has ended it. Weights, optimizer state, the schedule and
the generators come back; `load` copies into the tensors that exist, so that a step that is captured
already goes on replaying. The same two calls save and load sharded models on any number of ranks.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import graphfsdp
from graphfsdp.optim import FusedAdam

NUM_ITERATIONS, INTERVAL = 60, 20
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
optimizer = FusedAdam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_ITERATIONS)
objects = {"scheduler": scheduler}

first = 0
if (folder / "latest").exists():
    first = graphfsdp.load(folder, model, optimizer, objects=objects).step
    print(f"goes on behind iteration {first}")

with graphfsdp.capture(
    model, optimizer, loss_fn=lambda m, x, y: nn.functional.mse_loss(m(x), y)
) as step:
    for iteration in range(first, NUM_ITERATIONS):
        inputs = torch.rand(256, 2, device=device) * 6 - 3  # from a generator that is saved as well
        loss = step(inputs, inputs.sin().prod(dim=1, keepdim=True))
        scheduler.step()
        if iteration % INTERVAL == INTERVAL - 1:
            graphfsdp.save(folder, model, optimizer, objects=objects, step=iteration + 1)
            print(f"iteration {iteration + 1}  loss {loss:.6f}  ({step.phase.value})")
    if first == 0:  # back to the first checkpoint, under the graph that has been replaying
        graphfsdp.load(folder / f"step-{INTERVAL:08d}", model, optimizer, objects=objects)
        for _ in range(INTERVAL):
            inputs = torch.rand(256, 2, device=device) * 6 - 3
            loss = step(inputs, inputs.sin().prod(dim=1, keepdim=True))
            scheduler.step()
        print(f"again {2 * INTERVAL}  loss {loss:.6f}  ({step.phase.value})")
