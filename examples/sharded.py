"""Shard a model over the ranks, and capture the iteration with its collectives.

    torchrun --nproc-per-node 2 examples/sharded.py

Gloo on a CPU, NCCL with one GPU per rank. ``graphfsdp train`` does the same with flags.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn

import graphfsdp
from graphfsdp.optim import FusedAdam

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")

torch.manual_seed(0)  # the same initial weights on every rank
blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)]
model = nn.Sequential(nn.Linear(2, 128), *blocks, nn.Linear(128, 1)).to(device)
for block in blocks:  # inner modules first, the root last
    graphfsdp.fully_shard(block, strategy="optim_grads_params")
graphfsdp.fully_shard(model, strategy="optim_grads_params")
optimizer = FusedAdam(model.parameters(), lr=3e-3)  # holds states of this rank's rows alone

torch.manual_seed(1 + dist.get_rank())  # but other data
with graphfsdp.capture(
    model, optimizer, loss_fn=lambda m, x, y: nn.functional.mse_loss(m(x), y), max_grad_norm=1.0
) as step:
    for iteration in range(200):
        inputs = torch.rand(256, 2, device=device) * 6 - 3
        targets = inputs.sin().prod(dim=1, keepdim=True)
        loss = step(inputs, targets)
        if iteration % 50 == 49:  # an extra collective and a host read, so not every time
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                mean = loss / dist.get_world_size()
                print(f"iteration {iteration + 1}  loss {mean:.4f}  ({step.phase.value})")

dist.barrier()  # no rank leaves while another still talks to it
# Whoever still holds the group when Python ends would have gloo's threads end after it.
del model, block, blocks, optimizer, step
gc.collect()
dist.destroy_process_group()  # after the step is closed: a graph holds the communicators
