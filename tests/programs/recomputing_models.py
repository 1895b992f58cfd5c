"""A model whose blocks, or parts of them, run again in the backward pass."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import graphfsdp


def again(way: str, function: Any, *args: Tensor) -> Any:
    if not torch.is_grad_enabled():
        return function(*args)
    if way.endswith("ours"):
        return graphfsdp.recompute(function, *args)
    options: dict[str, Any] = {}
    if way.endswith("selective"):
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keeps_products)
    # It would set the state of a generator otherwise, which no graph can.
    reentrant = way.endswith("reentrant")
    options |= {"use_reentrant": reentrant, "preserve_rng_state": False}
    return checkpoint(function, *args, **options)


def keeps_products(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """As torchtitan does, which runs all the rest again."""
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Layer(nn.Module):
    """Two linear layers, dropout, and a parameter that belongs to the block itself."""

    def __init__(self, way: str, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.gain = nn.Parameter(torch.empty(8))
        self.dropout = nn.Dropout(dropout)
        self.way = way
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.5)

    def part(self, x: Tensor) -> Tensor:
        # The block's own parameter comes first: before a module says that it is called again.
        out: Tensor = self.dropout(self.down(torch.tanh(self.up(self.gain * x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + (again(self.way, self.part, x) if "part" in self.way else self.part(x))
        return out


class Recomputing(nn.Module):
    def __init__(self, way: str, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList([Layer(way, dropout) for _ in range(2)])
        self.head = nn.Linear(8, 17)
        self.way = way

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if "segment" in self.way:
            x = again(self.way, self.run, x)
        elif "block" in self.way:
            for block in self.blocks:
                x = again(self.way, block, x)
        else:
            x = self.run(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
