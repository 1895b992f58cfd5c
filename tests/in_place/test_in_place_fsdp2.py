"""What loops over sharded weights do between the model's call and the optimizer's step.

FSDP2's words, and what torch's users do to DTensors: with and without `capture_in_place`, which
leaves sharded modules as they are, bit for bit.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import graphfsdp
from helpers import NUM_STEPS
from parts_helpers import Loop, check
from ranks import on_ranks, rank_device
from sharding_helpers import hybrid_mesh

NUM_ITERATIONS = NUM_STEPS + 1


class Net(nn.Module):
    """Uneven rows; a method beside ``forward`` that calls it, as ``generate`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 5), nn.Linear(5, 8)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, 3)

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.second(torch.tanh(self.first(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(x))
        return out

    def twice(self, x: Tensor) -> Tensor:
        out: Tensor = self(x) + self.head(self.hidden(2 * x))
        return out


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Net().to(rank_device())
    graphfsdp.register_fsdp_forward_method(model, "twice")
    graphfsdp.fully_shard(model.second, **options)
    graphfsdp.fully_shard(model, **options)
    for name in ("twice", "hidden"):
        graphfsdp.register_fsdp_forward_method(model, name)
    return model


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    # What a GPU's is turned into; one made otherwise rounds otherwise.
    options: dict[str, Any] = {"lr": 1e-2, "foreach": False}
    if rank_device().type == "cuda":
        options = {"lr": torch.tensor(1e-2, device=rank_device()), "fused": True}
    return torch.optim.AdamW(model.parameters(), eps=1e-3, **options)


def batches(count: int = NUM_ITERATIONS) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(6, 8).to(rank_device()), torch.randint(3, (6,)).to(rank_device())


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y)


def accumulates_with_words(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """What three reductions round otherwise than one."""
    for index in range(NUM_ITERATIONS):
        for part, (x, y) in enumerate(batches(3)):
            model.set_requires_gradient_sync(part == 2)
            model.set_reshard_after_backward(part == 2)
            if index % 2:
                model.set_is_last_backward(part == 2)
            loss = loss_of(model(x), y) / 3
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first, second = batches(2)
        with model.no_sync():
            loss_of(model(first[0]), first[1]).backward()
        loss_of(model(second[0]), second[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def looks_at_gradients_and_weights(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Gathers the first unit ahead, as FSDP2's tutorial does; calls another method than forward."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for x, y in batches():
        handle = model.unshard(async_op=True)
        model.second.unshard()
        handle.wait()
        loss = loss_of(model.twice(x), y)
        for param in model.parameters():
            param.grad = None
        loss.backward()
        model.reshard()
        total: Any = clip_grad_norm_(model.parameters(), 0.1)
        largest: Any = clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf"))
        each: list[Any] = [param.grad.norm() for param in model.parameters()]
        of_all: Any = nn.utils.get_total_norm([param.grad for param in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, of_all.full_tensor())
        for param in model.parameters():
            param.grad.mul_(0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        whole = model.second.weight.detach().full_tensor().clone()
        rows = model.first.weight.detach().to_local().norm()
        optimizer.step()
        scheduler.step()
        assert total.device == rank_device()
        yield from (norm.full_tensor() for norm in (total, largest, of_all, *each))
        yield from (whole, rows, loss)
        model.eval()
        with torch.no_grad():
            yield model.twice(x[:2])
        model.train()


LOOPS: dict[str, Loop] = {
    "words": accumulates_with_words,
    "looks": looks_at_gradients_and_weights,
}


@pytest.mark.parametrize(
    ("ranks", "name", "axes"),
    [("ranks2", "words", 1), ("ranks2", "looks", 1), ("ranks4", "words", 2)],
)
@on_ranks()
def test_a_loop_with_words_of_fsdp2_trains_as_without_the_line(name: str, axes: int) -> None:
    options = {"mesh": hybrid_mesh(), "strategy": "optim_grads"} if axes == 2 else {}

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        torch.manual_seed(1 + torch.distributed.get_rank())
        yield from LOOPS[name](model, optimizer)

    with check(loop, partial(sharded, **options), make_adam) as parts:
        assert parts.phase is graphfsdp.Phase.EAGER
        assert "its weights are sharded" in str(parts.report())


@on_ranks("ranks2")
def test_an_optimizer_made_before_fully_shard_gets_the_new_parameters() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)).to(rank_device())
    optimizer = make_adam(model)
    graphfsdp.fully_shard(model)
    before = model[0].weight.full_tensor()
    with graphfsdp.capture_in_place(model, optimizer):
        for x, y in batches(1):
            loss_of(model(x), y).backward()
            optimizer.step()
    assert not torch.equal(model[0].weight.full_tensor(), before)
