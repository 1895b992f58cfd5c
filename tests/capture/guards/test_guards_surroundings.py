"""What the user's functions read around them is guarded, whatever way leads to it."""

import argparse
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch._dynamo import utils as dynamo_utils

import graphfsdp
from footgun_net import inputs, start
from surrounding_cases import (
    CASES,
    CPU,
    Frozen,
    Registry,
    Settings,
    Term,
    Trainer,
    assert_named_until_put_back,
)

UNUSED = 1.0


@pytest.mark.parametrize("name", CASES)
def test_what_changes_around_a_loss_is_named_until_it_is_put_back(name: str) -> None:
    assert_named_until_put_back(CASES[name])


def test_unused_functions_unread_numbers_and_a_scheduler_around_the_step_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = types.SimpleNamespace(model=types.SimpleNamespace(alpha=2.0, unread=1.0))
    step, _, optim = start(CPU, lambda model, x: functional.silu(model(x)) * config.model.alpha)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optim)  # wraps optim.step
    monkeypatch.setattr(functional, "celu", functional.relu)
    for _ in range(6):
        step(inputs(CPU))
        scheduler.step()
        config.model.unread += 1.0
    assert step.report().num_calls["replay"] == 2


def test_what_a_function_assigns_itself_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    log = {"calls": 0.0}
    total = 0

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal total
        total += 1
        log["calls"] += 1
        return trainer.loss(model, x)

    step, *_ = start(CPU, loss_fn)
    for index in range(8):
        step(inputs(CPU))
        total = log["calls"] = trainer.num_calls = trainer.iteration = index * 10
        monkeypatch.setattr(f"{__name__}.UNUSED", float(index))
    assert step.phase is graphfsdp.Phase.REPLAY


class Output:
    """What a model of another library returns."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


loss = 0.0


def reads_loss_of_the_output(model: nn.Module, x: Tensor) -> Tensor:
    return Output(model(x)).loss


class Program:
    """Keeps its last loss under the name that the model's output has, too."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.mean = self.loss = 0.0

    def loss_fn(self, model: nn.Module, x: Tensor) -> Tensor:
        return Output(model(x) * self.settings.weight + x.mean()).loss


def test_numbers_that_only_share_a_name_with_an_attribute_may_change() -> None:
    program, settings = Program(), argparse.Namespace(weight=1.0, mean=0.0)

    def by_settings(model: nn.Module, x: Tensor) -> Tensor:
        return Output(model(x) * settings.weight + x.mean()).loss

    for loss_fn in (reads_loss_of_the_output, program.loss_fn, by_settings):
        step, *_ = start(CPU, loss_fn)
        for _ in range(6):
            value = float(step(inputs(CPU)))
            globals()["loss"] = program.loss = program.mean = settings.mean = value
        assert step.phase is graphfsdp.Phase.REPLAY


@pytest.mark.parametrize("compiled", [False, True], ids=["no compile", "after torch.compile"])
def test_a_dict_of_the_model_with_methods_of_its_own_is_seen(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Anything that torch.compile has compiled in this process hides reads, but not these.
    counters = {"frames": {"ok": 1}} if compiled else {}
    monkeypatch.setattr(dynamo_utils, "counters", counters)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x) * model.registry.get(model)
        return loss

    step, model, *_ = start(CPU, loss_fn)
    registry = Registry(Net=1.0)
    model.registry = registry  # type: ignore[assignment]
    for _ in range(5):
        step(inputs(CPU))
    registry["Net"] = 2.0
    with pytest.raises(graphfsdp.GuardError, match="'Net' of attribute 'registry' was"):
        step(inputs(CPU))


class Loop:
    """Keeps what training loops keep, beside a loss that logs."""

    def __init__(self) -> None:
        self.config = {"weight": 1.0, "epoch": 0}
        self.settings = Frozen()
        self.history: list[Tensor] = []
        self.term = Term(1.0)
        self.best = self.num_steps = 0.0
        self.last: Tensor | None = None

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = self.term(model(x)) * self.config["weight"] * self.settings.weight
        self.last = loss.detach()
        self.history.append(self.last)
        return loss


def test_what_a_training_loop_keeps_beside_a_loss_may_change() -> None:
    program = Loop()
    step, *_ = start(CPU, program.loss, lr=0.1, warmup_steps=1)
    for index in range(8):
        loss = step(inputs(CPU))
        program.num_steps += 1
        program.best = min(program.best, float(loss))
        program.history.append(loss)
        program.settings = replace(program.settings, epoch=index)
        program.config = dict(program.config)  # an equal one
    assert step.report().num_calls["replay"] == 6


def test_objects_that_make_up_others_for_ever_do_not_stop_a_capture() -> None:
    class Endless:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Endless()

    endless, loop = Endless(), types.SimpleNamespace(weight=1.0)
    loop.next = loop

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        assert endless.next.next.next is not None
        loss: Tensor = model(x) * loop.next.next.weight
        return loss

    step, *_ = start(CPU, loss_fn, warmup_steps=1)
    for _ in range(4):
        step(inputs(CPU))
    assert step.phase is graphfsdp.Phase.REPLAY
