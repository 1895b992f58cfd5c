"""Models in float64 that model parallelism cuts before sharding.

Every run is in float64, where what is left between two right runs is rounding near 1e-15, so that
one tolerance separates it from any mistake.

Shapes: N = sequences, P = positions, H = width, E = experts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
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
from graphfsdp.base.collectives import all_gather_, reduce_scatter_
from ranks import rank_device
from sharding_helpers import (
    VOCABULARY,
    Block,
    batches,
    hybrid_mesh,
)

WIDTH = 8
NUM_EXPERTS = 4
NUM_STEPS = 15  # 4 that are not replays
TP_AXES = ("dp", "tp")
EP_AXES = ("edp", "ep")
Exchange = Callable[[Tensor, dist.ProcessGroup], Tensor]


class Experts(nn.Module):
    """Experts that all see every token, weighed by a gate; some on each rank of a group."""

    def __init__(self, first: int = 0, count: int = NUM_EXPERTS) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        whole = torch.randn(NUM_EXPERTS, WIDTH, WIDTH, generator=generator) / 4
        self.weight = nn.Parameter(whole[first : first + count].clone())
        self.bias = nn.Parameter(torch.zeros(count))
        self.first = first

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # [T, H], [T, E] -> [T, H]
        mine = gate[:, self.first : self.first + self.weight.shape[0]]
        hidden = torch.tanh(torch.einsum("th,ehk->tek", x, self.weight)) + self.bias[:, None]
        return torch.einsum("tek,te->tk", hidden, mine)


class _Exchange(torch.autograd.Function):
    """An exchange of rows; gradients go the other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Exchange, back: Exchange, group: Any) -> Tensor:
        ctx.back, ctx.group = back, group
        return there(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.group), None, None, None


def exchanged(rows: Tensor, there: Exchange, back: Exchange, group: Any) -> Tensor:
    found: Tensor = _Exchange.apply(rows, there, back, group)  # type: ignore[no-untyped-call]
    return found


def _gathered(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks."""
    whole = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    all_gather_(whole, rows.contiguous(), group)
    return whole


def _scattered(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of the sum of all ranks' results."""
    rows = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    reduce_scatter_(rows, whole.contiguous(), group, reduction="sum")
    return rows


class Mixture(nn.Module):
    """A residual mixture of experts; along ``group`` each rank holds other experts."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        self.group = group
        if group is None:
            self.experts = Experts()
        else:
            count = NUM_EXPERTS // group.size()
            self.experts = Experts(group.rank() * count, count)

    def forward(self, x: Tensor) -> Tensor:  # [N, P, H] -> [N, P, H]
        tokens = x.flatten(0, 1)
        gate = torch.softmax(self.gate(tokens), dim=-1)
        if self.group is None:
            alone: Tensor = x + self.experts(tokens, gate).view_as(x)
            return alone
        # Every rank's experts see the tokens of all ranks.
        both = (exchanged(each, _gathered, _scattered, self.group) for each in (tokens, gate))
        together = exchanged(self.experts(*both), _scattered, _gathered, self.group)
        return x + together.view_as(x)


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


def plain_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(WIDTH), Block(WIDTH) if kind == "feed" else Mixture()]
    return Stack(blocks).double()


def tensor_parallel(
    strategy: str = "optim_grads_params",
    *,
    sequence: bool = False,
    meta: bool = False,
    outer: str | None = None,
) -> Any:
    """Return the "feed" model on a (dp, tp) mesh, with two axes for dp if ``outer`` is given."""
    mesh = hybrid_mesh((2, 2), TP_AXES)
    data: Any = mesh["dp"]
    if outer is not None:
        mesh = hybrid_mesh((2, 1, 2), ("dp_replicate", "dp_shard", "tp"))
        data = mesh["dp_replicate", "dp_shard"]
    with torch.device("meta" if meta else "cpu"):
        model: Any = plain_model("feed")
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


def expert_parallel(strategy: str = "optim_grads_params", **options: Any) -> Any:
    """Return the "mixture" model: experts on an (edp, ep) mesh of their own, the rest on all."""
    mesh = hybrid_mesh((2, 2), EP_AXES)
    torch.manual_seed(0)
    model: Any = Stack([Block(WIDTH), Mixture(mesh.get_group("ep"))]).double().to(rank_device())
    mixture = model.blocks[1]
    graphfsdp.fully_shard(
        mixture.experts, mesh, shard_axis="edp", expert_axis="ep", strategy=strategy, **options
    )
    for block in model.blocks:
        graphfsdp.fully_shard(block, strategy=strategy)
    return graphfsdp.fully_shard(model, strategy=strategy)


def part_of_axis(batch: Sequence[Tensor], mesh: DeviceMesh, axis: str) -> list[Tensor]:
    """Return the rows of a whole batch that ranks at this place of an axis train on."""
    rows = len(batch[0]) // mesh[axis].size()
    first = mesh.get_local_rank(axis) * rows
    return [part[first : first + rows] for part in batch]


def whole_batches() -> list[tuple[Tensor, Tensor]]:
    return [(x.to(rank_device()), y.to(rank_device())) for x, y in batches(NUM_STEPS)]
