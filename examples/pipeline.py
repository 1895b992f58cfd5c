"""A pipeline of two stages whose whole schedule, with clipping and optimizer, is one graph.

    torchrun --nproc-per-node 2 examples/pipeline.py

Each rank has half of the layers. Forward and backward of every micro-batch, every send and receive
are nodes of its recording, in the order of torch's 1F1B schedule.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import graphfsdp
from graphfsdp.optim import FusedAdam


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank, num_stages = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # every rank draws the whole model, and keeps its part
    layers = [nn.Linear(2, 64), nn.GELU()]
    for _ in range(2 * num_stages - 2):
        layers += [nn.Linear(64, 64), nn.GELU()]
    layers += [nn.Linear(64, 1)]
    share = -(-len(layers) // num_stages)
    part = nn.Sequential(*layers[rank * share : (rank + 1) * share]).to(device)

    stage = PipelineStage(part, rank, num_stages, device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = FusedAdam(part.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)  # the same batches on all ranks

    with graphfsdp.capture(schedule, optimizer, max_grad_norm=1.0) as step:
        for iteration in range(200):
            inputs = (torch.rand(64, 2, generator=generator) * 6 - 3).to(device)
            targets = inputs.sin().prod(dim=1, keepdim=True)
            loss = step(inputs, target=targets)  # the last stage's, on all ranks
            if iteration % 50 == 49 and rank == 0:
                print(f"iteration {iteration + 1}  loss {loss:.4f}  ({step.phase.value})")

    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()


main()
