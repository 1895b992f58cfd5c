"""The learning rate over a run."""

import dataclasses
import math

import pytest
import torch

from graphfsdp.errors import ConfigError
from graphfsdp.optim import ParamScheduler
from graphfsdp.training.config import LrDecayStyle, LrWsdDecayStyle, TrainConfig

CONFIG = TrainConfig(lr=1.0, min_lr=0.2, lr_warmup_iters=10, train_iters=110)


def learning_rate(config: TrainConfig, iteration: int) -> float:
    return config.schedule.learning_rate(iteration, config.lr)


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


@pytest.mark.parametrize(
    ("style", "half"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_stays_at_the_full_rate_and_decays_at_the_end(
    style: LrWsdDecayStyle, half: float
) -> None:
    config = dataclasses.replace(
        CONFIG, lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=20
    )
    assert learning_rate(config, 4) == 0.5
    assert {learning_rate(config, iteration) for iteration in (10, 50, 90)} == {1.0}
    assert learning_rate(config, 91) < 1.0
    assert learning_rate(config, 100) == pytest.approx(0.2 + 0.8 * half)
    assert learning_rate(config, 110) == learning_rate(config, 500) == pytest.approx(0.2)


@pytest.mark.parametrize("num_iters", [None, 0, 101])
def test_wsd_needs_a_decay_that_fits_into_the_run(num_iters: int | None) -> None:
    with pytest.raises(ConfigError, match=f"expected 1 to 100.* got {num_iters}"):
        dataclasses.replace(CONFIG, lr_decay_style="WSD", lr_wsd_decay_iters=num_iters)


def test_cosine_is_a_half_wave() -> None:
    expected = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(CONFIG, 10 + 25) == pytest.approx(expected)


def test_torch_s_scheduler_sets_these_rates() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=CONFIG.lr)
    scheduler = ParamScheduler(optimizer, CONFIG.schedule)
    for iteration in range(CONFIG.train_iters):
        expected = learning_rate(CONFIG, iteration)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        scheduler.step()
