"""Each change of what the model and its optimizer hold is seen before a replay, and named."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guard_net import Body, Guarded, refused, start

Change = Callable[[Any], Any]


def assign(new: Callable[[Tensor], Tensor]) -> Change:
    """Return a change of ``tensor.data``."""
    return lambda tensor: setattr(tensor, "data", new(tensor.data))


def resized(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() + (1 << 22))


def set_other(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.zeros(tensor.shape, dtype=tensor.dtype))  # type: ignore[call-overload]


def swapped(tensor: Tensor) -> None:
    torch.utils.swap_tensors(tensor, torch.zeros_like(tensor))
    gc.collect()  # what was swapped out is freed


MOVES: dict[str, Change] = {
    "other memory": assign(Tensor.clone),
    "set_": set_other,
    "another place in the storage": assign(
        lambda data: data.as_strided(data.shape, data.stride(), data.storage_offset() + 1)
    ),
    "swapped": swapped,
    "a storage that grew": resized,
    "dtype": assign(lambda data: data.view(torch.int32)),
    "a dimension in front": assign(lambda data: data.unsqueeze(0)),
    "a dimension behind": assign(lambda data: data.unsqueeze(-1)),
    "fewer rows": assign(lambda data: data.narrow(0, 0, data.shape[0] - 1)),
    "wider strides": assign(lambda data: data.as_strided(data.shape, [2] * data.dim())),
    "one row": assign(lambda data: data.select(0, 0)),
    "requires_grad": lambda tensor: tensor.requires_grad_(),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("where", ["body.plain", "body.tensors"])
def test_each_change_of_a_tensor_is_seen(name: str, where: str) -> None:
    guarded = start()
    body = guarded.model.body
    MOVES[name](body.plain if where == "body.plain" else body.tensors[0])
    changes = refused(guarded, where)
    assert len({change.name for change in changes}) == 1
    guarded.step.close()


class OtherLinear(nn.Linear):
    """A class to exchange a module's class for."""


def emptied(module: nn.Module) -> None:
    module._buffers = {}


def state_of(run: Guarded) -> dict[str, Any]:
    found: dict[str, Any] = run.optim.state[run.model.scale]
    return found


def in_another_table(run: Guarded) -> None:
    """Add a parameter to a table that has taken another one's place before."""
    run.model.body._parameters = dict(run.model.body._parameters)
    run.step(run.batch())
    run.model.body._parameters["late"] = nn.Parameter(torch.ones(1))


def in_other_state(run: Guarded) -> None:
    run.optim.state[run.model.scale] = dict(state_of(run))
    run.step(run.batch())
    state_of(run)["exp_avg"] = torch.zeros(())


def after_a_write(run: Guarded) -> None:
    """Write what does not matter first, so that all dicts of the model are asked once more."""
    vars(run.model)["epoch"] = 1
    run.step(run.batch())
    run.model.body.temperature = 3.0


def sets(name: str, value: Any) -> Callable[[Guarded], None]:
    return lambda run: setattr(run.model.body, name, value)


CHANGES: dict[str, tuple[Callable[[Guarded], Any], str]] = {
    "buffer let go": (
        lambda run: setattr(run.model.body.table, "data", torch.ones(4)),
        "buffer 'body.table' was at address",
    ),
    "class": (
        lambda run: setattr(run.model.body.dropout, "__class__", nn.AlphaDropout),
        "class of 'body.dropout'",
    ),
    "derived class": (
        lambda run: setattr(run.model.body.layers[0], "__class__", OtherLinear),
        "class of 'body.layers.0' was Linear",
    ),
    "behind": (
        lambda run: object.__setattr__(run.model.body, "temperature", 3.0),
        "'body.temperature' was 2.0",
    ),
    "deleted": (lambda run: delattr(run.model.body, "temperature"), "'body.temperature' .*missing"),
    "after a write": (after_a_write, "'body.temperature' was 2.0"),
    "table": (lambda run: emptied(run.model.body), "buffer 'body.table' was .*absent"),
    "another table": (in_another_table, "parameter 'body.late' was absent"),
    "list item": (
        lambda run: run.model.body.numbers.__setitem__(0, 9.0),
        r"0 of attribute 'body\.numbers' was 2\.0 .* now 9\.0",
    ),
    "dict item": (
        lambda run: run.model.body.options.update(gain=9.0),
        r"'gain' of attribute 'body\.options' was 1\.0",
    ),
    "dict grown": (
        lambda run: run.model.body.options.update(new=9.0),
        r"'new' of attribute 'body\.options' was missing",
    ),
    "tensor of a list": (
        lambda run: run.model.body.tensors.__setitem__(0, torch.ones(4)),
        r"0 of attribute 'body\.tensors'",
    ),
    "object": (
        lambda run: setattr(run.model.body.data, "gain", 9.0),
        r"'gain' of attribute 'body\.data' was 2\.0",
    ),
    "object replaced": (sets("data", object()), r"attribute 'body\.data' was a Data"),
    "function": (sets("function", torch.sin), r"'body\.function' was one function"),
    "none": (sets("nothing", 9.0), r"'body\.nothing' was None .* now 9\.0"),
    "shadow": (sets("at_class", 9.0), r"'body\.at_class' was missing .* now 9\.0"),
    "state or": (lambda run: state_of(run).__ior__({"a": torch.ones(1)}), "'a' of 'scale'"),
    "other state": (in_other_state, "optimizer state 'exp_avg' of 'scale'"),
    "step count": (
        lambda run: assign(Tensor.clone)(state_of(run)["step"]),
        "optimizer state 'step' of 'scale' was at address",
    ),
    "reversed": (lambda run: run.optim.param_groups[0]["params"].reverse(), "group 0"),
    "other list": (
        lambda run: run.optim.param_groups[0].update(params=[run.model.scale]),
        "now of 1",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_what_is_held_is_refused_by_name(name: str) -> None:
    guarded = start()
    change, match = CHANGES[name]
    change(guarded)
    refused(guarded, match)
    guarded.step.close()


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("at_class", 9.0, r"Body\.at_class was 1\.0 .* now 9\.0"),
        ("forward", lambda model, x: x, r"Body\.forward was one function"),
    ],
)
def test_what_a_class_holds_is_guarded(
    name: str, value: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = start()
    monkeypatch.setattr(Body, name, value)
    refused(guarded, match)
