"""The learning rate over a run."""

import dataclasses
import math

import pytest
import torch

from graphfsdp.training.config import LrDecayStyle, TrainConfig
from graphfsdp.training.schedule import learning_rate, make_scheduler

CONFIG = TrainConfig(lr=1.0, min_lr=0.2, lr_warmup_iters=10, train_iters=110)


def test_warm_up_rises_in_equal_parts_to_the_full_rate() -> None:
    rates = [learning_rate(CONFIG, iteration) for iteration in range(10)]
    assert rates == pytest.approx([0.1 * count for count in range(1, 11)])


@pytest.mark.parametrize(
    ("style", "middle", "end"), [("constant", 1.0, 1.0), ("linear", 0.6, 0.2), ("cosine", 0.6, 0.2)]
)
def test_decay_goes_from_the_full_rate_to_the_smallest(
    style: LrDecayStyle, middle: float, end: float
) -> None:
    config = dataclasses.replace(CONFIG, lr_decay_style=style)
    assert learning_rate(config, 10) == 1.0
    assert learning_rate(config, 60) == pytest.approx(middle)
    assert learning_rate(config, 110) == pytest.approx(end)
    assert learning_rate(config, 1000) == pytest.approx(end)


def test_cosine_is_a_half_wave() -> None:
    expected = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(CONFIG, 10 + 25) == pytest.approx(expected)


def test_torch_s_scheduler_sets_these_rates() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=CONFIG.lr)
    scheduler = make_scheduler(CONFIG, optimizer)
    for iteration in range(CONFIG.train_iters):
        expected = learning_rate(CONFIG, iteration)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        scheduler.step()
