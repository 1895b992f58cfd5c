"""The trainer's learning rate: Megatron's own numbers, and flags that are refused by name."""

import json
import pathlib

import pytest

from graphfsdp.errors import ConfigError
from graphfsdp.training.arguments import parse_train_arguments
from graphfsdp.training.schedule import LrSchedule

RECORDED = json.loads(
    (pathlib.Path(__file__).parents[1] / "references" / "megatron_schedules.json").read_text()
)


@pytest.mark.parametrize("case", range(len(RECORDED["cases"])))
def test_the_numbers_are_those_of_megatron(case: int) -> None:
    arguments, numbers = RECORDED["cases"][case]["arguments"], RECORDED["cases"][case]["numbers"]
    schedules = [
        LrSchedule(
            style=arguments["lr_decay_style"],
            max_lr=max_lr,
            min_lr=min_lr,
            warmup=arguments["lr_warmup_steps"],
            warmup_init=arguments["init_lr"],
            decay_iters=arguments["lr_decay_steps"],
        )
        for max_lr, min_lr in ((arguments["max_lr"], arguments["min_lr"]), (0.5, 0.2))
    ]
    for iteration, rates in zip(RECORDED["iterations"], numbers, strict=True):
        assert [schedule.rate(iteration) for schedule in schedules] == rates, iteration


def test_without_a_first_rate_no_iteration_is_lost() -> None:
    schedule = LrSchedule("linear", 1.0, 0.0, warmup=4, warmup_init=None, decay_iters=20)
    rates = [schedule.rate(iteration) for iteration in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1 - 1 / 16]


def test_the_trainer_takes_megatrons_flags() -> None:
    flags = (
        "--train-iters 100 --lr 1 --lr-decay-style inverse-square-root --lr-decay-iters 80 "
        "--lr-warmup-iters 8 --lr-warmup-init 0 --min-lr 0.1"
    )
    schedule = parse_train_arguments(flags.split()).schedule
    assert (schedule.warmup, schedule.decay_iters) == (8, 80)
    assert schedule.rate(0) == 0
    assert schedule.rate(32) == 0.5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lr-decay-iters 5 --lr-warmup-iters 6", r"--lr-warmup-iters must be in \[0, --lr-decay"),
        ("--lr-decay-style WSD", "argument --lr-decay-style: invalid choice"),
        ("--lr-warmup-init 2 --lr 1", r"--lr-warmup-init must be in \[0, --lr 1.0\]"),
        ("--lr-decay-iters 0", "--lr-decay-iters must be at least 1"),
    ],
)
def test_wrong_flags_are_refused_by_name(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_train_arguments(flags.split())
