"""A model in float64 that model parallelism cuts before sharding.

Every run is in float64, where what is left between two right runs is rounding near 1e-15, so that
one tolerance separates it from any mistake.

Shapes: N = sequences, P = positions, H = width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import graphfsdp
from ranks import rank_device
from sharding_helpers import (
    VOCABULARY,
    Block,
    batches,
    hybrid_mesh,
)

WIDTH = 8
NUM_STEPS = 15  # 4 that are not replays
TP_AXES = ("dp", "tp")
EP_AXES = ("edp", "ep")


class Stack(nn.Module):
    """Blocks between an embedding and a head; a 0-D and a frozen parameter."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.frozen
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return Stack([Block(WIDTH), Block(WIDTH)]).double()


def tensor_parallel(
    strategy: str = "optim_grads_params",
    *,
    sequence: bool = False,
    meta: bool = False,
    outer: str | None = None,
) -> Any:
    """Return the model on a (dp, tp) mesh, with two axes for dp if ``outer`` is given."""
    mesh = hybrid_mesh((2, 2), TP_AXES)
    data: Any = mesh["dp"]
    if outer is not None:
        mesh = hybrid_mesh((2, 1, 2), ("dp_replicate", "dp_shard", "tp"))
        data = mesh["dp_replicate", "dp_shard"]
    with torch.device("meta" if meta else "cpu"):
        model: Any = plain_model()
    model = model if meta else model.to(rank_device())
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        # "Sequences" on dim 0, which is even: norms see half of them, and their gradients are
        # partial sums.
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
    for block in model.blocks:
        if sequence:
            halves, whole = Shard(0), Replicate()
            for style in (
                PrepareModuleInput(
                    input_layouts=whole, desired_input_layouts=halves, use_local_output=True
                ),
                PrepareModuleOutput(output_layouts=halves, desired_output_layouts=whole),
            ):
                parallelize_module(block, mesh["tp"], style)
        parallelize_module(block, mesh["tp"], dict(plan))
        graphfsdp.fully_shard(block, data, strategy=strategy, outer_strategy=outer or "no_shard")
    return graphfsdp.fully_shard(model, data, strategy=strategy, outer_strategy=outer or "no_shard")


def part_of_axis(batch: Sequence[Tensor], mesh: DeviceMesh, axis: str) -> list[Tensor]:
    """Return the rows of a whole batch that ranks at this place of an axis train on."""
    rows = len(batch[0]) // mesh[axis].size()
    first = mesh.get_local_rank(axis) * rows
    return [part[first : first + rows] for part in batch]


def whole_batches() -> list[tuple[Tensor, Tensor]]:
    return [(x.to(rank_device()), y.to(rank_device())) for x, y in batches(NUM_STEPS)]
