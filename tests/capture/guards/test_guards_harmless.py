"""What a replay does not depend on may change between two replays."""

import argparse
import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counting_net
from counting_net import mean_square
from guard_net import Around, refused, start
from helpers import Case, check_against_eager
from ways_to_a_value import Special
from zoo import features

CPU = torch.device("cpu")
loss = UNUSED = 0.0


LOADS = "optim.load_state_dict(copy.deepcopy(optim.state_dict()))"  # into new tensors by torch's
HARMLESS = (
    "model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})",
    LOADS,
    "model.eval(); model(batch()); model.train()",
    "model.epoch = 3",
    "body.unused = torch.zeros(5)",
    "body._count = 1",
    "body.calls_so_far['all'] = 7",
    "model.register_state_dict_post_hook(lambda *args: None)",
    "optim.zero_grad()",
    "model.scale.grad = torch.tensor(3.0)",
    "model.train()",
    "torch.optim.lr_scheduler.ConstantLR(optim, 1.0, 5).step()",
    "torch.set_num_threads(torch.get_num_threads())",
    "torch.manual_seed(5), body.noise.manual_seed(5)",
    "body.table.data.fill_(1.0)",
    "body.tensors[0].fill_(3.0)",
    "copy.deepcopy(model), repr(model), model.frozen.numpy()",
    "model.scale.register_hook(print).remove()",
    "model._alias = model.scale.detach()",
    "around.unused.eval()",
    "around.criterion.eval()",  # whose mode nobody reads
    "around.table['unused'] = torch.zeros(2)",
    "around.mask.zero_()",
    "around.mask = around.mask.view(4)",  # in the same memory
)


@pytest.mark.parametrize("optimizer", ["fused_adam", "adamw"])
def test_what_a_replay_does_not_depend_on_is_allowed(optimizer: str) -> None:
    guarded = start(optimizer)
    changes = [each for each in HARMLESS if optimizer != "adamw" or each != LOADS]
    for change in changes:
        guarded.does(change, {"torch": torch, "copy": copy})
        guarded.step(guarded.batch())
    with torch.no_grad():
        guarded.step(guarded.batch())
    assert guarded.step.report().num_calls["replay"] == 2 + len(changes)


def test_a_teacher_that_follows_in_place_is_seen_by_replays() -> None:
    around = Around()

    def follows(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        torch.manual_seed(11)
        vars(around).update(vars(Around()))  # the same in both runs

        def follow() -> None:
            with torch.no_grad():
                around.teacher[2].weight.lerp_(model[0].weight, 0.1)

        return follow

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        with torch.no_grad():
            wanted = around.teacher(x * around.mask)
        loss: Tensor = around.criterion(out, wanted.sigmoid()) + nn.Softmax(-1)(x)[0, 0]
        return loss

    case = Case(lambda: nn.Sequential(nn.Linear(4, 1)), features(4), loss_fn, follows)
    check_against_eager(case, CPU)


def test_what_changes_before_the_capture_is_no_change() -> None:
    guarded = start(num_calls=3)
    guarded.body.temperature = 0.7
    guarded.body.dropout.p = 0.1
    guarded.body.norm.eval()
    guarded.model.scale.register_hook(lambda grad: grad * 2)
    for _ in range(5):
        guarded.step(guarded.batch())
    # One more warm-up, since Python's numbers were not those of the last one.
    assert guarded.step.report().num_calls == {"warmup": 4, "capture": 1, "replay": 3}


def test_hooks_that_come_and_go_elsewhere_are_harmless() -> None:
    """They move the counter of hooks, so that each of ours is looked at, and found."""
    guarded = start()
    elsewhere = torch.nn.Linear(2, 2)
    for _ in range(3):
        elsewhere.register_forward_hook(lambda *args: None)
        guarded.step(guarded.batch())
    handle = guarded.model.scale.register_hook(lambda grad: grad)
    refused(guarded, "gradient hook .* of parameter 'scale'")
    handle.remove()
    guarded.step(guarded.batch())


class Endless:
    """Makes up others."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Endless()


@dataclass(frozen=True)
class Settings:
    """A configuration that is replaced, never changed."""

    weight: float = 1.0
    epoch: int = 0


class Loop:
    """Keeps what training loops keep."""

    def __init__(self) -> None:
        self.config = {"weight": 1.0, "epoch": 0}
        self.settings = Settings()
        self.arguments = argparse.Namespace(weight=1.0)
        self.special, self.endless = Special(), Endless()
        self.special.weight = 1
        self.chain = types.SimpleNamespace(weight=1.0)
        self.chain.next = self.chain
        self.history: list[Tensor] = []
        self.best = 0.0
        self.num_steps = self.num_calls = 0
        self.last: Tensor | None = None

    def loss_fn(self, model: nn.Module, x: Tensor) -> Tensor:
        self.num_calls += 1
        assert self.endless.next.next.next is not None
        weight = self.config["weight"] * self.settings.weight * self.special.weight
        weight *= self.arguments.weight * self.chain.next.next.weight
        loss: Tensor = mean_square(model, x) * weight
        self.last = loss.detach()
        self.history.append(self.last)
        return loss

    def goes_on(self, index: int, loss: Tensor) -> None:
        self.num_steps += 1
        self.num_calls = index * 10
        self.best = min(self.best, float(loss))
        self.history.append(loss)
        self.settings = replace(self.settings, epoch=index)
        self.config = dict(self.config)  # an equal one
        self.arguments.epoch = self.special.epoch = index


class Output:
    """What a model of another library returns."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Named(Loop):
    """Keeps its last loss under names that the model's output has, too, and counts."""

    def loss_fn(self, model: nn.Module, x: Tensor) -> Tensor:
        self.num_calls += 1
        return Output(mean_square(model, x) * self.settings.weight + x.mean()).loss

    def goes_on(self, index: int, loss: Tensor) -> None:
        self.mean = self.loss = float(loss)
        globals().update(loss=float(loss), UNUSED=float(index))


@pytest.mark.parametrize("make", [Loop, Named])
def test_what_nothing_reads_around_a_loss_may_change(make: type[Loop]) -> None:
    loop = make()
    step, _ = counting_net.start(loop.loss_fn, lr=0.1)
    for index in range(8):
        loop.goes_on(index, step(torch.ones(3, 4)))
    assert step.report().num_calls["replay"] == 4
