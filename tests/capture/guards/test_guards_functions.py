"""Tests of the guard of numbers around the user's functions."""

import argparse
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import utils as dynamo_utils

import graphfsdp
from footgun_net import inputs, start

FACTOR = 1.0
UNUSED = 1.0
MODULE = types.ModuleType("settings")
MODULE.__file__ = __file__
MODULE.WEIGHT = 1.0  # type: ignore[attr-defined]


@dataclass
class Settings:
    """Data, some of which the loss reads."""

    weight: float = 1.0
    epoch: int = 0


class Trainer:
    """Keeps numbers beside a loss."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.num_calls = 0
        self.iteration = 0

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        self.num_calls += 1
        loss: Tensor = model(x) * self.weight
        return loss

    __call__ = loss


def helper(loss: Tensor) -> Tensor:
    return loss * FACTOR


def by_helper(model: nn.Module, x: Tensor) -> Tensor:
    return helper(model(x))


def by_module(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x) * MODULE.WEIGHT
    return loss


def by_keyword(model: nn.Module, x: Tensor, *, weight: float) -> Tensor:
    loss: Tensor = model(x) * weight
    return loss


def refused(loss_fn: Any, change: Callable[[], None], undo: Callable[[], None]) -> str:
    cpu = torch.device("cpu")
    step, *_ = start(cpu, loss_fn)
    for _ in range(5):
        before = step(inputs(cpu))
    change()
    with pytest.raises(graphfsdp.GuardError, match="Remedy") as caught:
        step(inputs(cpu))
    undo()
    assert torch.equal(step(inputs(cpu)), before)
    return str(caught.value)


def test_a_global_that_a_helper_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(
        by_helper, lambda: monkeypatch.setattr(f"{__name__}.FACTOR", 2.0), monkeypatch.undo
    )
    assert "global variable 'FACTOR'" in message


def test_a_number_of_a_users_module(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(
        by_module, lambda: monkeypatch.setattr(MODULE, "WEIGHT", 2.0), monkeypatch.undo
    )
    assert "'WEIGHT' of global variable 'MODULE'" in message


@pytest.mark.parametrize("form", ["method", "object"])
def test_an_attribute_of_the_object_of_a_loss(form: str) -> None:
    trainer = Trainer()
    message = refused(
        trainer.loss if form == "method" else trainer,
        lambda: setattr(trainer, "weight", 2.0),
        lambda: setattr(trainer, "weight", 1.0),
    )
    assert "attribute 'weight' of Trainer.loss was 1.0" in message


def test_a_keyword_of_a_partial() -> None:
    loss_fn = functools.partial(by_keyword, weight=1.0)
    message = refused(
        loss_fn,
        lambda: loss_fn.keywords.update(weight=2.0),
        lambda: loss_fn.keywords.update(weight=1.0),
    )
    assert "keyword 'weight' of a functools.partial" in message


@pytest.mark.parametrize("make", [Settings, lambda: argparse.Namespace(weight=1.0, epoch=0)])
def test_what_is_read_of_a_configuration_and_nothing_else(make: Callable[[], Any]) -> None:
    settings = make()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x) * settings.weight
        return loss

    def change(value: float) -> None:
        settings.weight = value

    message = refused(loss_fn, lambda: change(2.0), lambda: change(1.0))
    assert "'weight' of closure variable 'settings'" in message
    step, *_ = start(torch.device("cpu"), loss_fn)
    for epoch in range(6):
        settings.epoch = epoch
        step(inputs(torch.device("cpu")))
    assert step.phase is graphfsdp.Phase.REPLAY


def test_what_a_function_assigns_itself_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    log = {"calls": 0.0}
    total = 0

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal total
        total += 1
        log["calls"] += 1
        return trainer.loss(model, x)

    step, *_ = start(torch.device("cpu"), loss_fn)
    for index in range(8):
        step(inputs(torch.device("cpu")))
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
        step, *_ = start(torch.device("cpu"), loss_fn)
        for _ in range(6):
            value = float(step(inputs(torch.device("cpu"))))
            globals()["loss"] = program.loss = program.mean = settings.mean = value
        assert step.phase is graphfsdp.Phase.REPLAY


def test_a_configuration_that_goes_by_another_name_is_seen() -> None:
    settings = Settings()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        known_as = settings
        loss: Tensor = (lambda value: value * known_as.weight)(model(x))
        return loss

    message = refused(
        loss_fn, lambda: setattr(settings, "weight", 2.0), lambda: setattr(settings, "weight", 1.0)
    )
    assert "'weight' of closure variable 'settings'" in message


class Registry(dict[str, float]):
    """A dict with methods of another form, as libraries have them."""

    def get(self, owner: object) -> float:  # type: ignore[override]
        return super().get(type(owner).__name__, 1.0)

    def items(self, owner: object) -> Any:  # type: ignore[override]
        return super().items()

    def copy(self, owner: object) -> Any:  # type: ignore[override]
        return self

    values = items  # type: ignore[assignment]


REGISTRY = Registry(Net=1.0)


def by_registry(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x) * REGISTRY.get(model)
    return loss


def test_a_global_dict_with_methods_of_its_own_is_seen() -> None:
    message = refused(
        by_registry, lambda: REGISTRY.update(Net=2.0), lambda: REGISTRY.update(Net=1.0)
    )
    assert "'Net' of global variable 'REGISTRY'" in message


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

    step, model, *_ = start(torch.device("cpu"), loss_fn)
    registry = Registry(Net=1.0)
    model.registry = registry  # type: ignore[assignment]
    for _ in range(5):
        step(inputs(torch.device("cpu")))
    registry["Net"] = 2.0
    with pytest.raises(graphfsdp.GuardError, match="'Net' of 'registry' was"):
        step(inputs(torch.device("cpu")))
