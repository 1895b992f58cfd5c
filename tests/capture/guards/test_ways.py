"""What is guarded, whatever way code goes to it, and what nothing reads, which may change."""

import argparse
import copy
import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from dis import get_instructions
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import utils as dynamo_utils

import graphfsdp
import guard_net
from counting_net import mean_square, refusal_of, start
from graphfsdp import HazardKind
from guard_net import Around, refused
from helpers import Case, check_against_eager, same_bits
from ways_to_a_value import WAYS, Special, Told, Way
from zoo import features

X = torch.ones(3, 4)


def one() -> int:
    return 1


HELPER = one


def of_helper() -> Way:
    def put(n: int) -> None:
        global HELPER
        HELPER = one if n == 1 else lambda: n

    return Way(lambda: HELPER(), put, "'HELPER' .* one function .* another function")


def of_defaults() -> Way:
    def read(weight: int = 1) -> int:
        return weight

    put = lambda n: setattr(read, "__defaults__", (n,))  # noqa: E731
    return Way(lambda: read(), put, "the default arguments of")


def of_code() -> Way:
    def read() -> int:
        return 1

    codes = {1: read.__code__, 2: (lambda: 2).__code__}
    return Way(lambda: read(), lambda n: setattr(read, "__code__", codes[n]), "the code of .*read")


def of_keyword() -> Way:
    given = functools.partial(lambda weight: weight, weight=1)
    put = lambda n: given.keywords.update(weight=n)  # noqa: E731
    return Way(lambda: given(), put, "keyword 'weight' of a functools.partial")


def of_its_class() -> Way:
    """Return the way to what an object has of its class until it gets something of its own."""
    owner = Told()

    def put(n: int) -> None:
        if n == 1:
            vars(owner).clear()
        else:
            owner.weight = n

    return Way(lambda: owner.weight, put, "'weight' of .* was missing")


def of_absent(owner: Any) -> Way:
    """Return the way to what is asked for by its name, with a default until it is there."""

    def put(n: int) -> None:
        if n != 1:
            owner.absent = n
        elif hasattr(owner, "absent"):
            del owner.absent

    return Way(lambda: getattr(owner, "absent", 1), put, "'absent' of .* was missing")


def of_memory() -> Way:
    weight = torch.ones(())
    memory = {1: weight.data, 2: torch.full((), 2.0)}
    named = "closure variable 'weight' .* in other memory"
    return Way(lambda: weight, lambda n: setattr(weight, "data", memory[n]), named)


def of_tensor() -> Way:
    state = types.SimpleNamespace(weight=None)
    tensors = {1: torch.ones(()), 2: torch.full((), 2.0)}
    named = "'weight' of closure variable 'state' .*one Tensor.*another Tensor"
    return Way(lambda: state.weight, lambda n: setattr(state, "weight", tensors[n]), named)


class Model(nn.Linear):
    """Has numbers, of which a private one is told as well."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.number, self._private, self.epoch = 1, 1, 0

    @property
    def told(self) -> int:
        return self._private


def behind_another(model: Any) -> Any:
    one = 1
    return model.number * one


def of_model(read: Callable[[Any], Any], name: str = "number") -> Way:
    """Return the way to a number of the model, however it is read, and to none beside it."""
    model = Model()

    def put(n: int) -> None:
        setattr(model, name, n)
        model.epoch += 1

    return Way(lambda: read(model), put, f"attribute '{name}' was 1 .* now 2", model=model)


def of_hook() -> Way:
    way = of_model(lambda model: 1)
    model: Any = way.model
    model.register_forward_hook(lambda layer, args, out: out * model.number)
    return way


# What is replaced, and no iteration counts in.
REPLACED: dict[str, Callable[[], Way]] = {
    "function": of_helper,
    "default_arguments": of_defaults,
    "code": of_code,
    "keyword_of_a_partial": of_keyword,
    "attribute_of_its_class": of_its_class,
    "absent_attribute": lambda: of_absent(types.SimpleNamespace()),
    "absent_attribute_of_a_class": lambda: of_absent(type("Settings", (), {})),
    "memory_of_a_tensor": of_memory,
    "tensor": of_tensor,
    "model_behind_another_variable": lambda: of_model(behind_another),
    "dict_of_the_model": lambda: of_model(lambda model: model.__dict__["number"]),
    "copy_of_the_model": lambda: of_model(lambda model: vars(copy.copy(model))["number"]),
    "property_of_the_model": lambda: of_model(lambda model: model.told, "_private"),
    "hasattr_alone": lambda: of_model(lambda model: 1 if hasattr(model, "number") else 2),
    "hook": of_hook,
}


def merged(code: Any) -> list[Any]:
    """Return instructions as Python 3.13 has them, where two variables are loaded by one."""
    found: list[Any] = []
    for each in get_instructions(code):
        before = found[-1] if found else None
        if each.opname == "LOAD_FAST" and before and before.opname in ("LOAD_FAST", "STORE_FAST"):
            names = before.argval, each.argval
            found[-1] = types.SimpleNamespace(opname=f"{before.opname}_LOAD_FAST", argval=names)
        else:
            found.append(each)
    return found


@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        *((name, get_instructions) for name in (*WAYS, *REPLACED)),
        *((name, merged) for name in REPLACED if "model" in name),
    ],
)
def test_a_value_that_has_changed_is_named_until_it_is_put_back(
    name: str, instructions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dis.get_instructions", instructions)
    way = (WAYS | REPLACED)[name]()
    way.put(1)
    loss_fn = lambda model, x: mean_square(model, x) * way.read()  # noqa: E731
    step, _ = start(loss_fn, way.model, warmup_steps=1)
    for _ in range(3):
        before = step(X)
    way.put(2)
    with pytest.raises(graphfsdp.GuardError, match=way.named) as caught:
        step(X)
    assert "Remedy:" in str(caught.value)
    way.put(1)
    assert torch.equal(step(X), before)
    assert step.report().num_captures == 1


@pytest.mark.parametrize("name", WAYS)
def test_a_count_that_one_day_decides_is_refused_at_once(name: str) -> None:
    way = WAYS[name]()
    way.put(1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss * 2 if way.counted() > 1_000 else loss

    error = refusal_of(loss_fn)
    assert "moves Python" in str(error)
    assert "reads it for more" in str(error)
    assert " -> " in str(error)
    assert error.kind is HazardKind.BAKED_NUMBER


@pytest.mark.parametrize("compiled", [False, True], ids=["no compile", "after torch.compile"])
def test_what_is_compiled_reads_below_python_so_each_public_number_counts(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Anything that torch.compile has compiled in this process hides reads.
    monkeypatch.setattr(dynamo_utils, "counters", {"frames": {"ok": 1}} if compiled else {})
    step, model = start(mean_square, Model(), warmup_steps=1)
    for _ in range(3):
        step(X)
    model._private = 4
    step(X)
    model.epoch = 3
    with pytest.raises(graphfsdp.GuardError, match="'epoch'") if compiled else nullcontext():
        step(X)


def test_an_evaluation_follows_what_its_own_forward_pass_reads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="graphfsdp")
    read: Any = lambda model: model.number if model.training else model.epoch + 1.0  # noqa: E731
    step, model = start(lambda model, x: mean_square(model, x) * read(model), Model())
    for _ in range(5):
        step(X)
    losses = [step.evaluate(X) for _ in range(3)]
    model.num_seen = 3  # which nothing names
    losses.append(step.evaluate(X))
    assert all(same_bits(loss, losses[0]) for loss in losses)
    assert "another graph" not in caplog.text
    model.epoch = 1
    assert float(step.evaluate(X)) == pytest.approx(2 * float(losses[0]))
    assert "another graph, attribute 'epoch' was 0" in caplog.text


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
    guarded = guard_net.start(optimizer)
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
    guarded = guard_net.start(num_calls=3)
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
    guarded = guard_net.start()
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
    step, _ = start(loop.loss_fn, lr=0.1)
    for index in range(8):
        loop.goes_on(index, step(X))
    assert step.report().num_calls["replay"] == 4
