"""Loops over sharded weights, with and without `capture_in_place`, which leaves them alone."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import graphfsdp
from helpers import NUM_STEPS
from parts_helpers import check
from ranks import on_ranks, rank_device

NUM_ITERATIONS = NUM_STEPS + 1


def sharded() -> Any:
    """Return a model with uneven rows."""
    torch.manual_seed(0)
    layers = (nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    model = nn.Sequential(*layers).to(rank_device())
    graphfsdp.fully_shard(model[2])
    return graphfsdp.fully_shard(model)


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    # What a GPU's is turned into; one made otherwise rounds otherwise.
    options: dict[str, Any] = {"lr": 1e-2, "foreach": False}
    if rank_device().type == "cuda":
        options = {"lr": torch.tensor(1e-2, device=rank_device()), "fused": True}
    return torch.optim.AdamW(model.parameters(), eps=1e-3, **options)


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(6, 8).to(rank_device()), torch.randint(3, (6,)).to(rank_device())


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y)


def accumulates_with_words(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """What three reductions round otherwise than one."""
    torch.manual_seed(1 + torch.distributed.get_rank())
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


@on_ranks("ranks2")
def test_a_loop_with_words_of_fsdp2_trains_as_without_the_line() -> None:
    with check(accumulates_with_words, sharded, make_adam) as parts:
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
