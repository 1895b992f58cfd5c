"""Schedules in Megatron's terms: Megatron's own numbers, groups, states, and replays."""

import copy
import json
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam, ParamSchedule, ParamScheduler
from graphfsdp.training.arguments import parse_train_arguments

RECORDED = json.loads(
    (pathlib.Path(__file__).parents[1] / "references" / "megatron_schedules.json").read_text()
)


def schedule_of(recorded: dict[str, Any]) -> ParamSchedule:
    """Return the schedule that Megatron's arguments mean."""
    whole_warmup = isinstance(recorded["lr_warmup_steps"], int)
    increases = recorded["wd_incr_style"] != "constant"
    return ParamSchedule(
        lr_decay_iters=recorded["lr_decay_steps"],
        lr_decay_style=recorded["lr_decay_style"],
        lr_warmup_iters=recorded["lr_warmup_steps"] if whole_warmup else 0,
        lr_warmup_fraction=None if whole_warmup else 0.07,
        lr_warmup_init=recorded["init_lr"],
        min_lr=recorded["min_lr"],
        lr_wsd_decay_style=recorded["lr_wsd_decay_style"] or "exponential",
        lr_wsd_decay_iters=recorded["wsd_decay_steps"],
        weight_decay_incr_style=recorded["wd_incr_style"],
        start_weight_decay=recorded["start_wd"] if increases else None,
        end_weight_decay=recorded["end_wd"] if increases else None,
        weight_decay_incr_iters=recorded["wd_incr_steps"],
    )


@pytest.mark.parametrize("case", range(len(RECORDED["cases"])))
def test_the_numbers_are_those_of_megatron(case: int) -> None:
    recorded = RECORDED["cases"][case]
    arguments, numbers = recorded["arguments"], iter(recorded["numbers"])
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups: list[dict[str, Any]] = [
        {"params": params[:1], "weight_decay": 0.1},
        {"params": params[1:], "max_lr": 0.5, "min_lr": 0.2, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=arguments["max_lr"])
    scheduler = ParamScheduler(optimizer, schedule_of(arguments))
    for iteration in range(RECORDED["iterations"][-1] + 1):
        if iteration in RECORDED["iterations"]:
            found = [g[key] for g in optimizer.param_groups for key in ("lr", "weight_decay")]
            assert found == next(numbers), iteration
        optimizer.step()
        scheduler.step()


def test_without_a_first_rate_no_iteration_is_lost() -> None:
    schedule = ParamSchedule(20, "linear", lr_warmup_iters=4, lr_warmup_init=None)
    rates = [schedule.learning_rate(iteration, 1.0) for iteration in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1 - 1 / 16]


def make_optimizer(tensor_lr: bool = False) -> FusedAdam:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.3}]
    lr = torch.tensor(0.1, dtype=torch.float64) if tensor_lr else 0.1
    return FusedAdam(groups, lr=lr, weight_decay=0.5)


SCHEDULE = ParamSchedule(
    10,
    "cosine",
    lr_warmup_iters=2,
    weight_decay_incr_style="linear",
    start_weight_decay=0.0,
    end_weight_decay=1.0,
)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_saved_schedule_goes_on(tensor_lr: bool) -> None:
    optimizer, other = make_optimizer(tensor_lr), make_optimizer(tensor_lr)
    scheduler, resumed = (ParamScheduler(o, SCHEDULE) for o in (optimizer, other))
    slot = other.param_groups[0]["lr"]
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    state = copy.deepcopy(scheduler.state_dict())
    assert "schedule" not in state
    resumed.load_state_dict(state)
    resumed.apply()
    for _ in range(4):
        for ours, theirs in zip(optimizer.param_groups, other.param_groups, strict=True):
            assert float(ours["lr"]) == float(theirs["lr"]) > 0
            assert ours["weight_decay"] == theirs["weight_decay"] > 0
        assert resumed.get_last_lr() == scheduler.get_last_lr()
        for o, s in ((optimizer, scheduler), (other, resumed)):
            o.step()
            s.step()
    assert (other.param_groups[0]["lr"] is slot) == tensor_lr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_decay_style": "cosinus"}, "lr_decay_style must be one of constant, linear"),
        ({"lr_decay_iters": 0}, "lr_decay_iters must be at least 1, got 0"),
        ({"lr_warmup_iters": 10}, r"lr_warmup_iters must be in \[0, lr_decay_iters=10\), got 10"),
        ({"lr_warmup_fraction": 1.0}, r"lr_warmup_fraction must be in \[0, 1\), got 1.0"),
        ({"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}, "left out beside lr_warmup_iters=1"),
        ({"min_lr": float("nan")}, "min_lr must be at least 0 and finite, got nan"),
        ({"lr_decay_style": "WSD"}, "lr_wsd_decay_iters iterations; expected 1 to 10, .* got None"),
        ({"start_weight_decay": 0.1}, "'constant' leaves each group's weight_decay as it is"),
        (
            {
                "weight_decay_incr_style": "linear",
                "start_weight_decay": 0.2,
                "end_weight_decay": 0.1,
            },
            "needs 0 <= start_weight_decay <= end_weight_decay, got 0.2 and 0.1",
        ),
    ],
)
def test_wrong_schedules_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParamSchedule(**{"lr_decay_iters": 10, **settings})


def test_a_group_below_the_smallest_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group 0 is 0\.1; expected at least min_lr=0\.2"):
        ParamScheduler(make_optimizer(), ParamSchedule(10, min_lr=0.2))


def test_the_trainer_takes_megatrons_flags() -> None:
    flags = (
        "--train-iters 100 --lr 1 --lr-decay-style inverse-square-root --lr-decay-iters 80 "
        "--lr-warmup-fraction 0.1 --lr-warmup-init 0 --min-lr 0.1 "
        "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.2"
    )
    schedule = parse_train_arguments(flags.split()).schedule
    assert (schedule.warmup, schedule.lr_decay_iters, schedule.weight_decay_incr_iters) == (
        8,
        80,
        100,
    )
    assert schedule.learning_rate(0, 1.0) == 0
    assert schedule.learning_rate(32, 1.0) == 0.5
    assert schedule.weight_decay(50, 0.0, 0.2) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", "both say how long the warm-up is"),
        ("--lr-decay-iters 5 --lr-warmup-iters 6", r"--lr-warmup-iters must be in \[0, --lr-decay"),
        ("--weight-decay-incr-style linear", "needs 0 <= --start-weight-decay <= --end-weight"),
        ("--lr-warmup-init 2 --lr 1", r"--lr-warmup-init must be in \[0, --lr 1.0\]"),
        ("--lr-decay-iters 0", "--lr-decay-iters must be at least 1"),
    ],
)
def test_wrong_flags_are_refused_by_name(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_train_arguments(flags.split())
