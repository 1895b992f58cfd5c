"""Send weights as MXFP8: eight bits and a shared exponent for 32 values, half of bfloat16's bytes.

    torchrun --nproc-per-node 2 examples/mxfp8_gather.py [mxfp8 | float8 | float8_rowwise | none]

Main weights and the optimizer stay in float32; layers compute in bfloat16 with what was sent. The
weights are quantised once in an iteration, inside the graph.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import graphfsdp
from graphfsdp.optim import FusedAdam


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    gather_format = sys.argv[1] if len(sys.argv) > 1 else "mxfp8"

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(32, 128), *blocks, nn.Linear(128, 1)).to(device)
    policy = graphfsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        gather_format=None if gather_format == "none" else gather_format,
    )
    for block in blocks:
        graphfsdp.fully_shard(block, mp_policy=policy)
    graphfsdp.fully_shard(model, mp_policy=policy)
    optimizer = FusedAdam(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + dist.get_rank())
    with graphfsdp.capture(
        model, optimizer, loss_fn=lambda m, x, y: nn.functional.mse_loss(m(x).float(), y)
    ) as step:
        for iteration in range(200):
            inputs = torch.rand(256, 32, device=device) * 2 - 1
            loss = step(inputs, (2 * inputs[:, :2].sum(dim=1, keepdim=True)).sin())
            if iteration % 50 == 49 and dist.get_rank() == 0:
                print(f"iteration {iteration + 1}  loss {loss:.4f}  ({step.phase.value})")

    dist.barrier()
    dist.destroy_process_group()


main()
