"""Models that do more with weights than compute once: as on one rank, and captured as eager."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    Block,
    assert_trains_as_whole,
    num_steps_of,
    replayed_as_eager,
    shard,
)

WIDTH = 8


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x).square().mean()
        return out


class Twice(Stack):
    """Units that run twice in a forward pass, one of them with statistics."""

    def __init__(self) -> None:
        super().__init__(Block(WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(super().forward(x) + x))


class Recurrent(Stack):
    """An LSTM as a unit: torch keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM(WIDTH, WIDTH, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks[0](x[:, None])[0]).square().mean()
        return out


class _OwnWeightGradient(torch.autograd.Function):
    """A linear map whose backward adds to the weight's gradient buffer by itself."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.get_main_grad = weight.get_main_grad  # type: ignore[attr-defined]
        assert weight.grad_added_to_main_grad is False  # type: ignore[attr-defined]
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        ctx.get_main_grad().addmm_(grads[0].t(), inputs)
        # A dummy, as fused layers return one for autograd's sake.
        return grads[0] @ weight, torch.full_like(weight, float("nan"))


class OwnLinear(nn.Linear):
    """A linear layer in the manner of a fused weight-gradient GEMM, where there is a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if not hasattr(self.weight, "get_main_grad"):
            return super().forward(input)
        result: Tensor = _OwnWeightGradient.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return result


class Penalized(Stack):
    """Its blocks compute a penalty on their weights in their own forward."""

    def __init__(self) -> None:
        super().__init__(PenalizedLinear(WIDTH, WIDTH), PenalizedLinear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.blocks[0](x)
        x, second = self.blocks[1](x)
        loss: Tensor = self.head(x).square().mean() + 0.1 * (first + second)
        return loss


class PenalizedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Any:  # noqa: A002
        return super().forward(input), self.weight.square().sum()


class Contrast(nn.Module):
    """An encoder and its running average, which the forward pass updates.

    The writes reach weights that were gathered ahead, or for the microbatch before.
    """

    def __init__(self) -> None:
        super().__init__()
        query = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        self.blocks = nn.ModuleList([query, copy.deepcopy(query).requires_grad_(False)])

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.blocks
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = key(x)
        loss: Tensor = (query(x) - target - 1).square().mean()
        return loss


KINDS: dict[str, Any] = {
    "runs twice": Twice,
    "recurrent": Recurrent,
    "adds to gradients": lambda: Stack(OwnLinear(), OwnLinear()),
    "penalized": Penalized,
    "averages": Contrast,
}


@pytest.mark.parametrize(
    ("kind", "strategy", "microbatches"),
    [
        ("runs twice", "optim_grads", 1),
        ("runs twice", "optim_grads_params", 1),
        ("recurrent", "optim", 1),
        ("recurrent", "optim_grads_params", 1),
        *(("adds to gradients", strategy, 2) for strategy in STRATEGIES),
        *(("penalized", strategy, 1) for strategy in STRATEGIES),
        ("averages", "optim", 2),
        ("averages", "optim_grads_params", 1),
    ],
)
@on_ranks("ranks2")
def test_what_layers_do_with_weights_is_right(kind: str, strategy: str, microbatches: int) -> None:
    num_steps = num_steps_of(strategy, "optim_grads_params")

    def make(strategy: str | None, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = KINDS[kind]().to(rank_device(), torch.float64)
        return model if strategy is None else shard(model, strategy, **options)

    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(num_steps, 12, WIDTH, generator=generator, dtype=torch.float64)
    whole = drawn.to(rank_device())
    # Interleaved, so that each microbatch has the same rows however many ranks there are. Where
    # statistics are to be those of one process, each rank has all rows.
    apart = slice(None) if kind == "runs twice" else slice(dist.get_rank(), None, 2)
    data = [(x[apart],) for x in whole]
    options: dict[str, Any] = {"microbatches": microbatches}
    got = replayed_as_eager(
        partial(make, strategy),
        eager=partial(make, strategy, overlap=False),
        num_steps=num_steps,
        data=data,
        **options,
    )
    assert_trains_as_whole(got, whole=make(None), data=[(x,) for x in whole], **options)
