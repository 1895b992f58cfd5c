"""What one rank meets and the others do not: all of them do the same, at once."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import CaptureError, Phase
from graphfsdp.optim import FusedAdam
from hidden_count import Unseen
from ranks import RankPool, rank_device


class Scaled(nn.Module):
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
