"""Numbers that the recorded iteration has read are guarded, however it reads them; others are free.

Each reader is a way in which Python code comes by ``model.number``.
"""

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import same_bits


class Net(nn.Module):
    """Multiplies by whatever the reader finds."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.number = 2.0
        self._private = 3.0
        self.epoch = 0
        self.num_seen = 0
        self.read_by = [read]

    @property
    def from_property(self) -> float:
        return self.number

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.layer(x) * self.read_by[0](self)).square().mean()
        return loss


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.num_seen += 1
        return super().forward(x)


class ReadsInBackward(torch.autograd.Function):
    """Identity whose gradient is multiplied by the number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.model.number, None


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(4)
    while True:
        yield torch.randn(3, 4, generator=generator)


def start(
    read: Callable[[Any], float],
    prepare: Callable[[Net], None] | None = None,
    make: Callable[[Callable[[Any], float]], Net] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = (make or Net)(read)
    if prepare is not None:
        prepare(model)
    step = graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.1), **options)
    for _ in range(5):
        step(torch.ones(3, 4))
    return step, model


READERS: dict[str, Callable[[Any], float]] = {
    "attribute": lambda model: model.number,
    "attrgetter": operator.attrgetter("number"),
    "vars": lambda model: vars(model)["number"],
    "dict": lambda model: model.__dict__["number"],
    "copied": lambda model: float(vars(copy.copy(model))["number"]),
    "method_of_a_class": lambda model: Net.from_property.fget(model),  # type: ignore[attr-defined]
    "hasattr_only": lambda model: 1.0 if hasattr(model, "number") else 2.0,
}


@pytest.mark.parametrize("name", READERS)
def test_a_number_that_was_read_is_guarded(name: str) -> None:
    step, model = start(READERS[name])
    model.number = 5.0
    with pytest.raises(graphfsdp.GuardError, match=r"attribute 'number' was 2\.0 .* now 5\.0"):
        step(torch.ones(3, 4))
    model.number = 2.0
    step(torch.ones(3, 4))


def test_a_private_number_that_was_read_is_guarded() -> None:
    step, model = start(lambda model: model._private)
    model.number = 7.0  # nobody reads it here
    step(torch.ones(3, 4))
    model._private = 5.0
    with pytest.raises(graphfsdp.GuardError, match=r"attribute '_private' was 3\.0"):
        step(torch.ones(3, 4))


def add_hook(model: Net) -> None:
    model.layer.register_forward_hook(lambda layer, args, out: out * model.number)


@pytest.mark.parametrize(
    ("loss_fn", "prepare"),
    [
        (lambda model, x: model(x) * model.number, None),
        (lambda model, x: ReadsInBackward.apply(model(x), model), None),  # type: ignore[no-untyped-call]
        (None, add_hook),
    ],
    ids=["loss_function", "backward_pass", "hook"],
)
def test_a_number_that_is_read_outside_of_forward_is_guarded(
    loss_fn: Any, prepare: Callable[[Net], None] | None
) -> None:
    step, model = start(lambda model: 1.0, prepare, loss_fn=loss_fn)
    model.number = 5.0
    with pytest.raises(graphfsdp.GuardError, match="'number'"):
        step(torch.ones(3, 4))


def test_numbers_of_the_training_loop_are_free() -> None:
    runs = []
    for scope in ("none", "full_iteration"):
        step, model = start(lambda model: model.number, make=Counting, scope=scope)
        data = batches()
        losses = []
        for epoch in range(10):
            model.epoch = epoch
            model._private *= 2.0
            model.num_seen = 0
            losses.append(step(next(data)))
        runs.append([*losses, model.layer.weight.detach().clone()])
        expected = "eager" if scope == "none" else "replay"
        assert step.report().num_calls[expected] >= 10
    assert all(same_bits(one, other) for one, other in zip(*runs, strict=True))


def test_an_evaluation_follows_what_its_own_forward_pass_reads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="graphfsdp")
    step, model = start(lambda model: model.number if model.training else model.epoch + 1.0)
    losses = [step.evaluate(torch.ones(3, 4)) for _ in range(3)]
    model.num_seen = 3  # which nothing names
    losses.append(step.evaluate(torch.ones(3, 4)))
    assert all(same_bits(loss, losses[0]) for loss in losses)
    assert "another graph" not in caplog.text
    model.epoch = 1
    assert float(step.evaluate(torch.ones(3, 4))) == pytest.approx(4 * float(losses[0]))
    assert "another graph, attribute 'epoch' was 0" in caplog.text


def test_reads_below_python_count_as_reads_of_everything() -> None:
    """What is compiled reads past Python, so a public number nobody was seen to read counts."""
    compiled = torch.compile(lambda x: x * 2.0, backend="eager")
    compiled(torch.ones(2))
    step, model = start(lambda model: 1.0)
    model._private = 4.0
    step(torch.ones(3, 4))
    model.epoch = 3
    with pytest.raises(graphfsdp.GuardError, match="'epoch'"):
        step(torch.ones(3, 4))
    step, model = start(lambda model: model._private)  # a private one that was read is guarded
    model._private = 5.0
    with pytest.raises(graphfsdp.GuardError, match=r"attribute '_private' was 3\.0"):
        step(torch.ones(3, 4))


def test_a_recording_leaves_the_class_of_modules_as_it_was() -> None:
    before = dict(vars(nn.Module))

    def broken(model: Any) -> float:
        if model.epoch == 3:
            raise RuntimeError("broken on purpose")
        return 1.0

    step, model = start(broken)
    step.close()
    again = graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.1), warmup_steps=1)
    again(torch.ones(3, 4))
    model.epoch = 3
    with pytest.raises(RuntimeError, match="on purpose"):
        again(torch.ones(3, 4))
    assert dict(vars(nn.Module)) == before


class Data:
    def __init__(self) -> None:
        self.gain = 2.0
        self.table = {"k": 2.0}


class Holder(Net):
    """Holds numbers in all sorts of things, and reads them all."""

    at_class = 2.0

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__(read)
        self.numbers = [2.0, 3.0]
        self.options = {"gain": 2.0}
        self.flags = {"on"}
        self.nested = ((2.0, 3.0), 4.0)
        self.data = Data()
        self.function = torch.tanh
        self.nothing: float | None = None
        self.of_numpy = np.float32(2.0)
        self.kinds = frozenset({"one"})
        self.tensors = [torch.full((4,), 2.0)]
        self.generators = [torch.Generator().manual_seed(1)]
        self.counts = {"calls": 0}
        self.unread = {"gain": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        gain = self.numbers[0] * self.options["gain"] * self.nested[0][1] * self.at_class
        gain *= self.data.gain * self.data.table["k"] * (2.0 if "on" in self.flags else 1.0)
        gain *= 1.0 if self.nothing is None else self.nothing
        gain *= float(self.of_numpy) * len(self.kinds)
        out = self.function(self.layer(x)) * self.tensors[0]
        out = out + torch.rand(out.shape, generator=self.generators[0])
        return gain * out.square().mean()


class CountingHolder(Holder):
    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return super().forward(x)


class OtherLinear(nn.Linear):
    """A class to exchange a module's class for."""


Values = tuple[Callable[[Holder], Any], str]
VALUES: dict[str, Values] = {
    "list_item": (
        lambda m: m.numbers.__setitem__(0, 9.0),
        r"0 of attribute 'numbers' was 2\.0 .* now 9\.0",
    ),
    "list_replaced": (lambda m: setattr(m, "numbers", [9.0]), "attribute 'numbers'"),
    "dict_item": (lambda m: m.options.update(gain=9.0), r"'gain' of attribute 'options' was 2\.0"),
    "dict_grown": (lambda m: m.options.update(new=9.0), "'new' of attribute 'options' was missing"),
    "set": (lambda m: m.flags.clear(), "'flags' was {'on'}"),
    "tuple": (lambda m: setattr(m, "nested", ((2.0, 9.0), 4.0)), "attribute 'nested'"),
    "data": (lambda m: setattr(m.data, "gain", 9.0), r"'gain' of attribute 'data' was 2\.0"),
    "data_replaced": (lambda m: setattr(m, "data", object()), "attribute 'data' was a Data"),
    "function": (lambda m: setattr(m, "function", torch.sin), "'function' was one function"),
    "numpy": (lambda m: setattr(m, "of_numpy", np.float32(9.0)), r"'of_numpy' was .*2\.0"),
    "frozenset": (lambda m: setattr(m, "kinds", frozenset({"one", "two"})), "attribute 'kinds'"),
    "none": (lambda m: setattr(m, "nothing", 9.0), r"'nothing' was None .* now 9\.0"),
    "tensor": (lambda m: m.tensors.__setitem__(0, torch.ones(4)), "0 of attribute 'tensors'"),
    "class": (lambda m: setattr(m.layer, "__class__", OtherLinear), "class of 'layer' was Linear"),
    "shadow": (lambda m: setattr(m, "at_class", 9.0), r"'at_class' was missing .* now 9\.0"),
}


def start_holder() -> tuple[Any, Holder]:
    return start(lambda model: 1.0, make=Holder)


@pytest.mark.parametrize("name", VALUES)
def test_what_modules_hold_and_the_iteration_reads_is_guarded(name: str) -> None:
    change, match = VALUES[name]
    step, model = start_holder()
    change(model)
    with pytest.raises(graphfsdp.GuardError, match=match):
        step(torch.ones(3, 4))


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("at_class", 9.0, r"Holder\.at_class was 2\.0 .* now 9\.0"),
        ("forward", lambda model, x: x.sum(), r"Holder\.forward was one function"),
    ],
)
def test_what_a_class_holds_is_guarded(
    name: str, value: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _ = start_holder()
    monkeypatch.setattr(Holder, name, value)
    with pytest.raises(graphfsdp.GuardError, match=match):
        step(torch.ones(3, 4))


def test_containers_that_the_iteration_counts_in_or_does_not_read_are_free() -> None:
    step, model = start(lambda model: 1.0, make=CountingHolder)
    for _ in range(3):
        model.unread.update(gain=9.0)
        model.counts["calls"] = 0
        model.tensors[0].fill_(3.0)
        model.generators[0].manual_seed(3)
        step(torch.ones(3, 4))
    assert step.report().num_calls["replay"] == 4
