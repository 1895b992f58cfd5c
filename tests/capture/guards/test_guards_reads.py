"""Numbers of a model that the recorded iteration has read are guarded, however it reads them."""

import copy
from collections.abc import Callable
from dis import get_instructions
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import utils as dynamo_utils

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import same_bits

Read = Callable[[Any], float]


class Net(nn.Module):
    """Multiplies by whatever the reader finds."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.number = 2.0
        self._private = 3.0
        self.epoch = 0
        self.read_by = [read]

    @property
    def from_property(self) -> float:
        return self.number

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.layer(x) * self.read_by[0](self)).square().mean()
        return loss


def nothing(model: Any) -> float:
    return 1.0


def start(read: Read, prepare: Callable[[Net], Any] = nothing, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = Net(read)
    prepare(model)
    step = graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.1), **options)
    for _ in range(5):
        step(torch.ones(3, 4))
    return step, model


def add_hook(model: Net) -> None:
    model.layer.register_forward_hook(lambda layer, args, out: out * model.number)


def behind_another(model: Net) -> float:
    one = 1.0
    return model.number * one


READERS: dict[str, tuple[Read, dict[str, Any]]] = {
    "behind_another_variable": (behind_another, {}),
    "dict": (lambda model: model.__dict__["number"], {}),
    "copied": (lambda model: float(vars(copy.copy(model))["number"]), {}),
    "property": (lambda model: Net.from_property.fget(model), {}),  # type: ignore[attr-defined]
    "hasattr_only": (lambda model: 1.0 if hasattr(model, "number") else 2.0, {}),
    "loss_function": (nothing, {"loss_fn": lambda model, x: model(x) * model.number}),
    "hook": (nothing, {"prepare": add_hook}),
}


def merged(code: Any) -> list[Any]:
    """Return instructions as Python 3.13 has them, where two variables are loaded by one."""
    found: list[Any] = []
    for each in get_instructions(code):
        before = found[-1] if found else None
        if each.opname == "LOAD_FAST" and before and before.opname in ("LOAD_FAST", "STORE_FAST"):
            names = before.argval, each.argval
            found[-1] = SimpleNamespace(opname=f"{before.opname}_LOAD_FAST", argval=names)
        else:
            found.append(each)
    return found


@pytest.mark.parametrize("instructions", [get_instructions, merged], ids=["plain", "merged"])
@pytest.mark.parametrize("name", READERS)
def test_a_number_that_was_read_is_guarded_and_another_one_is_not(
    name: str, instructions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dis.get_instructions", instructions)
    read, options = READERS[name]
    step, model = start(read, **options)
    model._private = 7.0  # nobody reads it here
    model.number = 5.0
    with pytest.raises(graphfsdp.GuardError, match=r"attribute 'number' was 2\.0 .* now 5\.0"):
        step(torch.ones(3, 4))
    model.number = 2.0
    step(torch.ones(3, 4))


@pytest.mark.parametrize("compiled", [False, True], ids=["no compile", "after torch.compile"])
def test_what_is_compiled_reads_below_python_so_each_public_number_counts(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Anything that torch.compile has compiled in this process hides reads.
    counters = {"frames": {"ok": 1}} if compiled else {}
    monkeypatch.setattr(dynamo_utils, "counters", counters)
    step, model = start(nothing)
    model._private = 4.0
    step(torch.ones(3, 4))
    model.epoch = 3
    if compiled:
        with pytest.raises(graphfsdp.GuardError, match="'epoch'"):
            step(torch.ones(3, 4))
    step, model = start(lambda model: model._private)  # a private one that was read is guarded
    model._private = 5.0
    with pytest.raises(graphfsdp.GuardError, match=r"attribute '_private' was 3\.0"):
        step(torch.ones(3, 4))


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
