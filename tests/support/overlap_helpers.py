"""A stack of blocks in any order; a journal of collectives, and somebody who watches them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers import Operators
from ranks import rank_device
from recomputing_models import again
from sharding_helpers import Block, shard, units

WIDTH = 16  # of which two and three ranks lay a block out in one buffer
NUM_BLOCKS = 4


@contextmanager
def short_up_to(num_bytes: int) -> Iterator[None]:
    """Join collectives of so many bytes together; of 0 each unit has its own, as large ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphfsdp.base.joined.MAX_BYTES", num_bytes)
        yield


class Stack(nn.Module):
    """Blocks that run in the order that ``order`` names; some may be left out or run twice."""

    def __init__(
        self, width: int = WIDTH, num_blocks: int = NUM_BLOCKS, recompute: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.head = nn.Linear(width, 4)
        self.order = list(range(num_blocks))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            block = self.blocks[index]
            x = again("block_torch", block, x) if self.recompute else block(x)
        out: Tensor = self.head(x).square().mean()
        return out


def make_stack(strategy: str = "optim_grads_params", **options: Any) -> Any:
    torch.manual_seed(0)
    return shard(Stack().to(rank_device()), strategy, **options)


def inputs(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    return [torch.randn(6, WIDTH, generator=generator).to(rank_device()) for _ in range(num)]


class Journal(Operators):
    """Notes collectives with the name of the buffer's unit, and what is alive meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._line)
        self.lines: list[str] = []
        self._names: dict[int, str] = {}  # of shards of weights and gradients, by address
        for unit in units(model):
            for index, buffer in enumerate(unit.group.buffers):
                name = f"{unit.group.name or 'root'}/{index}"
                self._names[buffer.main.data_ptr()] = name
                if buffer.grad is not None:
                    self._names[buffer.grad.data_ptr()] = name

    def _line(self, op: str, args: Any) -> None:
        kind = op.removeprefix("graphfsdp.").partition("_.")[0]
        if kind in ("all_gather", "reduce_scatter", "wait"):
            found = [self._names.get(tensor.data_ptr()) for tensor in args[:2]]
            name = next((name for name in found if name is not None), "several")
            ticket = args[-1] if kind != "wait" else None
            begun = isinstance(ticket, Tensor)
            self.lines.append(f"{'begin ' if begun else ''}{kind} {name}")


class Watch(Operators):
    """Tells somebody of each collective of a kind: its output and its input."""

    def __init__(self, kind: str, note: Callable[[Tensor, Tensor], None]) -> None:
        name = f"graphfsdp.{kind}_."
        super().__init__(lambda op, args: note(*args[:2]) if op.startswith(name) else None)
