"""What one rank meets and the others do not: all of them do the same, at once."""

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
import rank_steps
from faults import FaultMode, World
from graphfsdp import CaptureError, Phase
from graphfsdp.optim import FusedAdam
from helpers import quick_garbage_collection
from rank_steps import WIDTH, batch
from ranks import GROUP_TIMEOUT_S, RankPool, on_ranks, rank_device
from sharding_helpers import units
from unseen import Unseen


class Scaled(nn.Module):
    """Multiplies by a number of Python's."""

    def __init__(self, numbers: Unseen) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        number = next(self.numbers)
        loss: Tensor = (self.linear(x) * number).square().mean()
        return loss


def counts_on_one_rank(numbers_of_rank_1: list[float]) -> tuple[list[bool], int, Tensor]:
    model = Scaled(Unseen(*(numbers_of_rank_1 if dist.get_rank() == 1 else [5.0])))
    graphfsdp.fully_shard(model.to(rank_device()))
    step = graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.01))
    refused = []
    for _ in range(8):
        try:
            step(torch.ones(8, 4, device=rank_device()))
            refused.append(False)
        except CaptureError:
            refused.append(True)
    assert step.phase is Phase.REPLAY
    num_warmups = step.report().num_calls["warmup"]
    step.close()
    weight: Any = model.linear.weight
    return refused, num_warmups, weight.full_tensor()


def test_what_one_rank_refuses_keeps_all_ranks_in_step(ranks2: RankPool) -> None:
    # 4 after 3 costs one more warm-up, with 5; 6 in the next capture is refused on both ranks.
    # The value of the mended program is compared with that of the refused capture once more.
    expected = [False] * 4 + [True] * 2 + [False] * 2
    for refused, *_ in ranks2.run(counts_on_one_rank, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]):
        assert refused == expected


def test_a_number_that_one_rank_changes_before_the_capture_costs_all_one_more_warm_up(
    ranks2: RankPool,
) -> None:
    first, second = ranks2.run(counts_on_one_rank, [5.0, 5.0, 5.0, 9.0])
    steady, _ = ranks2.run(counts_on_one_rank, [5.0, 5.0, 5.0, 5.0])
    assert first[:2] == second[:2] == ([False] * 8, 4)
    assert steady[:2] == ([False] * 8, 3)
    assert torch.equal(first[2], second[2])


def build(strategy: str, scope: str, **options: Any) -> tuple[Any, nn.Module, FusedAdam]:
    # A failed iteration makes units forget their order, and the next one prefetches nothing: for
    # the capture after it that is another path, which costs a warm-up or a refusal more.
    step, model, optim = rank_steps.build(strategy, scope, nn.BatchNorm1d(WIDTH), **options)
    for unit in units(model):
        unit.schedule._prefetch = lambda entries: None  # type: ignore[method-assign]
    return step, model, optim


class OneRank:
    """Training in which something goes wrong on one rank, again and again."""

    def __init__(self, strategy: str, **options: Any) -> None:
        eager, *_ = build(strategy, "none")
        self.expected = [eager(batch(index)) for index in range(10)]
        self.step, self.model, self.optim = build(strategy, "full_iteration", **options)
        self.num_trained = 0

    def train(self, mode: Any = None) -> None:
        """Train once more; nothing that went wrong must have left a trace."""
        x = batch(self.num_trained)
        with mode or contextlib.nullcontext():
            got = self.step(x)
        assert torch.equal(got, self.expected[self.num_trained]), self.num_trained
        self.num_trained += 1

    def fail(
        self,
        kinds: tuple[type[BaseException], type[BaseException]],
        message: str,
        x: Tensor,
        mode: FaultMode | None = None,
        *,
        without_gradients: bool = True,
    ) -> None:
        """Call once, with what this rank has to raise; the other rank names it."""
        quick_garbage_collection()
        world = World(self.model, self.optim)
        started = time.monotonic()
        inside = mode or contextlib.nullcontext()
        with pytest.raises(kinds[dist.get_rank()], match=message), inside:
            self.step(x)
        assert time.monotonic() - started < GROUP_TIMEOUT_S / 3
        world.assert_unchanged(message, without_gradients=without_gradients)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks("ranks2")
def test_what_all_ranks_refuse_ends_the_call_and_training_goes_on(strategy: str) -> None:
    training = OneRank(strategy)
    x, short = batch(100), batch(101)[:2]
    mismatch = (graphfsdp.BatchMismatchError,) * 2
    training.train()
    training.fail(mismatch, "^batch leaf", short, without_gradients=False)
    training.train()
    training.train()
    assert training.step.phase is Phase.REPLAY
    training.fail(mismatch, "^batch leaf", short)
    training.train()
    training.model.eval()
    training.fail((graphfsdp.GuardError,) * 2, r"the model \(with .*was in train mode", x)
    training.model.train()
    training.train()
    training.step.close()
