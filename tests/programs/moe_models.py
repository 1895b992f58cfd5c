"""Models with experts, and what a dropless layer with sizes from the data makes of its tokens.

Shapes: N = sequences, P = positions, C = width.
"""

import functools
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import graphfsdp
from graphfsdp.moe import MoE
from parallel_models import EP_AXES
from ranks import rank_device
from sharding_helpers import hybrid_mesh

VOCABULARY = 17
NUM_POSITIONS = 5
WIDTH = 16


# Of a difference's norm to that of the numbers, where sums have another order.
_BOUNDS = MappingProxyType({torch.bfloat16: 0.1, torch.float32: 1e-5, torch.float64: 1e-13})


def dropless(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Loop over experts, each with as many rows as have chosen it; needs the host.

    The width of an expert must be a multiple of 64: kernels of activations round the last few
    numbers of a tensor otherwise than the others.
    """
    weights, experts, _, aux_loss = layer.router(x if x.dim() == 3 else x[None])
    copies = x.reshape(-1, x.shape[-1])[:, None].expand(-1, experts.shape[1], -1).flatten(0, 1)
    found = torch.zeros_like(copies)
    for expert in range(layer.experts.up.shape[0]):
        places = (experts.flatten() == expert).nonzero()[:, 0]
        if not len(places):
            continue
        rows = copies[places]
        hidden = rows @ layer.experts.up[expert]
        if layer.experts.gate is None:
            hidden = F.gelu(hidden)
        else:
            hidden = F.silu(rows @ layer.experts.gate[expert]) * hidden
        found = found.index_copy(0, places, hidden @ layer.experts.down[expert])
    mixed = (found.view(*weights.shape, -1) * weights.to(found.dtype)[..., None]).sum(1)
    return mixed.view_as(x), aux_loss


def assert_same_sums(found: Tensor, wanted: Tensor) -> None:
    """On a CPU bit for bit; a GPU adds in an order that depends on sizes."""
    if not found.is_cuda or torch.equal(found, wanted):
        assert torch.equal(found, wanted)
        return
    error = (found - wanted).double().norm() / wanted.double().norm()
    assert error < _BOUNDS[found.dtype]


def tokens_of(num_sequences: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (num_sequences, NUM_POSITIONS)
    tokens, targets = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
    return tokens, targets


class MixedBlock(nn.Module):
    def __init__(self, recomputes: bool, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, 64, 4, **options)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [N, P, C] -> [N, P, C]; []
        # The router, which is called first again, reads a weight of a layer that it does not call.
        mix = functools.partial(graphfsdp.recompute, self.moe) if self.recomputes else self.moe
        mixed, aux_loss = mix(self.norm(x))
        return x + mixed, aux_loss


class MixedModel(nn.Module):
    """Returns its loss; the second of two blocks may recompute."""

    def __init__(
        self,
        *,
        recomputes: bool = False,
        expert_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            MixedBlock(recomputes, expert_group=expert_group, **options) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, aux_losses = self.embedding(tokens), []
        for block in self.blocks:
            x, aux_loss = block(x)
            aux_losses.append(aux_loss)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return loss + torch.stack(aux_losses).sum()


def experts_on_ranks(
    num_expert_ranks: int, strategy: str, dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    """Return the model of all, sharded, with experts on an (edp, ep) mesh of their own."""
    torch.manual_seed(0)
    mesh = hybrid_mesh((dist.get_world_size() // num_expert_ranks, num_expert_ranks), EP_AXES)
    model: Any = MixedModel(expert_group=mesh.get_group("ep"), **options)
    model = model.to(rank_device(), dtype)
    for block in model.blocks:
        if num_expert_ranks > 1:
            graphfsdp.fully_shard(
                block.moe.experts, mesh, shard_axis="edp", expert_axis="ep", strategy=strategy
            )
        graphfsdp.fully_shard(block, strategy=strategy)
    return graphfsdp.fully_shard(model, strategy=strategy)
