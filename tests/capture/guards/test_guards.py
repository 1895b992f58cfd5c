"""What a graph has baked in is compared before each replay, named when it changed, and free again.

Each change is made between two replays. The replay must be refused with the exact thing named, and
nothing may have run. Where the change can be taken back, replays go on as if nothing had been.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import graphfsdp
from graphfsdp import ChangeKind
from guard_net import Guarded, refused, start
from helpers import assert_same_state, same_bits

Undo = Callable[[], Any]
Apply = Callable[[Guarded], Undo]


@pytest.fixture(scope="module")
def twins() -> tuple[Guarded, Guarded]:
    """A step of which changes are taken back again, and an undisturbed one."""
    return start(), start()


def both(do: Callable[[Any], Any], undo: Callable[[Any], Any]) -> Apply:
    def apply(guarded: Guarded) -> Undo:
        do(guarded.model)
        return lambda: undo(guarded.model)

    return apply


def set_attribute(path: str, name: str, value: Any) -> Apply:
    def apply(guarded: Guarded) -> Undo:
        module = guarded.model.get_submodule(path)
        old = getattr(module, name)
        setattr(module, name, value)
        return lambda: setattr(module, name, old)

    return apply


def move(path: str) -> Apply:
    """Return a move of a tensor to other memory, with equal contents."""

    def apply(guarded: Guarded) -> Undo:
        *owner, name = path.split(".")
        tensor: Tensor = getattr(guarded.model.get_submodule(".".join(owner)), name)
        old = tensor.data
        tensor.data = old.clone()

        def undo() -> None:
            tensor.data = old

        return undo

    return apply


def replace(path: str) -> Apply:
    """Return a replacement of a tensor by another object with equal contents."""

    def apply(guarded: Guarded) -> Undo:
        *owner, name = path.split(".")
        module = guarded.model.get_submodule(".".join(owner))
        old: Tensor = getattr(module, name)
        new = old.detach().clone()
        as_parameter = isinstance(old, nn.Parameter)
        setattr(module, name, nn.Parameter(new, old.requires_grad) if as_parameter else new)
        return lambda: setattr(module, name, old)

    return apply


def take(path: str, table: str, name: str) -> Apply:
    def apply(guarded: Guarded) -> Undo:
        held = getattr(guarded.model.get_submodule(path), table)
        old = held.pop(name)
        return lambda: held.update({name: old})

    return apply


def transpose_data(model: Any) -> None:
    weight = model.body.layers[0].weight
    weight.data = weight.data.t()


def reverse_layers(model: Any) -> None:
    table = model.body.layers._modules
    for name in reversed(list(table)):
        table[name] = table.pop(name)


MODEL_CHANGES: dict[str, tuple[Apply, str, ChangeKind]] = {
    "eval": (
        both(lambda m: m.eval(), lambda m: m.train()),
        r"the model \(with 6 modules in it\) was in train .* now in eval .*model\.train\(\)",
        ChangeKind.MODE,
    ),
    "eval_of_one": (
        both(lambda m: m.body.dropout.eval(), lambda m: m.body.dropout.train()),
        r"module 'body\.dropout' was in train .*body\.dropout\.train\(\)",
        ChangeKind.MODE,
    ),
    "dropout_rate": (
        set_attribute("body.dropout", "p", 0.5),
        r"attribute 'body\.dropout\.p' was 0\.25 .* now 0\.5",
        ChangeKind.ATTRIBUTE,
    ),
    "generator": (
        set_attribute("body", "noise", torch.Generator()),
        r"attribute 'body\.noise' was <torch",
        ChangeKind.ATTRIBUTE,
    ),
    "forward": (
        both(
            lambda m: setattr(m.body.dropout, "forward", lambda x: x),
            lambda m: vars(m.body.dropout).pop("forward"),
        ),
        r"'body\.dropout\.forward'",
        ChangeKind.ATTRIBUTE,
    ),
    "parameter_moved": (
        move("body.layers.1.weight"),
        r"parameter 'body\.layers\.1\.weight' was at address 0x\w+ .* in other memory",
        ChangeKind.ADDRESS,
    ),
    "frozen_parameter_moved": (move("frozen"), "parameter 'frozen'", ChangeKind.ADDRESS),
    "buffer_moved": (move("body.table"), r"buffer 'body\.table'", ChangeKind.ADDRESS),
    "parameter_replaced": (
        replace("body.layers.0.bias"),
        r"parameter 'body\.layers\.0\.bias' was one tensor .* another one, in other memory",
        ChangeKind.STRUCTURE,
    ),
    "buffer_replaced": (
        replace("body.norm.running_mean"),
        r"buffer 'body\.norm\.running_mean'",
        ChangeKind.STRUCTURE,
    ),
    "attribute_replaced": (replace("body.plain"), r"'body\.plain'", ChangeKind.ATTRIBUTE),
    "strides": (
        both(transpose_data, transpose_data),
        r"'body\.layers\.0\.weight' was of stride \(4, 1\) .* now of stride \(1, 4\)",
        ChangeKind.LAYOUT,
    ),
    "frozen": (
        both(
            lambda m: m.body.layers[0].weight.requires_grad_(False),
            lambda m: m.body.layers[0].weight.requires_grad_(True),
        ),
        r"'body\.layers\.0\.weight' was trained .* now frozen.*requires_grad_\(True\)",
        ChangeKind.REQUIRES_GRAD,
    ),
    "module_replaced": (
        set_attribute("body", "dropout", nn.Identity()),
        r"module 'body\.dropout' was a Dropout .* now a Identity",
        ChangeKind.STRUCTURE,
    ),
    "module_replaced_by_one_of_its_kind": (
        set_attribute("body", "dropout", nn.Dropout(0.75)),
        r"'body\.dropout' was a Dropout\(p=0.* now another object, a Dropout\(p=0.75.*in place",
        ChangeKind.STRUCTURE,
    ),
    "module_added": (
        both(lambda m: m.body.layers.append(nn.Linear(4, 4)), lambda m: m.body.layers.pop(2)),
        r"module 'body\.layers\.2' was absent",
        ChangeKind.STRUCTURE,
    ),
    "module_removed": (
        take("body.layers", "_modules", "1"),
        r"'body\.layers\.1' was a Linear .* absent",
        ChangeKind.STRUCTURE,
    ),
    "buffer_added": (
        both(
            lambda m: m.body.norm.register_buffer("extra", torch.zeros(1)),
            lambda m: delattr(m.body.norm, "extra"),
        ),
        r"'body\.norm\.extra'",
        ChangeKind.STRUCTURE,
    ),
    "parameter_added": (
        both(
            lambda m: m.body.register_parameter("late", nn.Parameter(torch.zeros(3))),
            lambda m: delattr(m.body, "late"),
        ),
        r"parameter 'body\.late'",
        ChangeKind.STRUCTURE,
    ),
    "modules_reversed": (
        both(reverse_layers, reverse_layers),
        r"the order of the modules in 'body\.layers' was 0, 1 .* is now 1, 0",
        ChangeKind.STRUCTURE,
    ),
    "parameter_removed": (
        set_attribute("body.layers.1", "bias", None),
        r"parameter 'body\.layers\.1\.bias' was a Parameter .* now None",
        ChangeKind.STRUCTURE,
    ),
}


@pytest.mark.parametrize("name", MODEL_CHANGES)
def test_a_change_of_the_model_is_refused_by_name(
    name: str, twins: tuple[Guarded, Guarded]
) -> None:
    apply, match, kind = MODEL_CHANGES[name]
    guarded, undisturbed = twins
    undo = apply(guarded)
    (change,) = refused(guarded, match)
    assert change.kind is kind
    undo()
    for _ in range(2):
        loss = undisturbed.train(undisturbed.batch())
        assert same_bits(guarded.train(guarded.batch()), loss)
    assert_same_state(undisturbed.snapshot(), guarded.snapshot(), "at the end")


def test_a_thawed_parameter_is_refused_also_under_no_grad() -> None:
    guarded = start()
    guarded.model.frozen.requires_grad_(True)
    with torch.no_grad():
        (change,) = refused(guarded, "parameter 'frozen' was frozen")
    assert change.kind is ChangeKind.REQUIRES_GRAD


def test_a_parametrization_is_refused() -> None:
    guarded = start()
    layer = guarded.model.body.layers[0]
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    names = {change.name for change in refused(guarded, r"module 'body\.layers\.0\.parametriz")}
    assert "parameter 'body.layers.0.weight'" in names


@pytest.mark.parametrize("how", ["to", "assign", "half"])
def test_a_moved_model_is_refused_with_all_its_tensors(how: str) -> None:
    guarded = start()
    model = guarded.model
    if how == "assign":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    else:
        model.to(torch.float64) if how == "to" else model.half()
    changes = refused(guarded, "in other memory")
    text = "\n".join(map(str, changes))
    for name, _ in model.named_parameters():
        assert repr(name) in text


def test_several_changes_are_all_named() -> None:
    guarded = start()
    guarded.model.body.dropout.eval()
    guarded.model.body.temperature = 1.0
    guarded.model.scale.requires_grad_(False)
    # Each in a line of its own, and the remedy in one behind them.
    said = r"(?s)not run:(\n  [^\n]+){3}\nRemedy: .*; or capture again, as \S+ does$"
    changes = refused(guarded, said)
    assert len(changes) == 3
    assert {change.kind for change in changes} == {
        ChangeKind.MODE,
        ChangeKind.ATTRIBUTE,
        ChangeKind.REQUIRES_GRAD,
    }


def test_many_changes_are_counted() -> None:
    guarded = start()
    for index in range(12):
        guarded.model.body.register_buffer(f"late{index}", torch.zeros(2))
    assert len(refused(guarded, "(?s)'body.late7'.*and 4 more")) == 12


def test_a_refusal_can_be_followed_by_a_new_capture() -> None:
    guarded = start()
    guarded.model.body.temperature = 0.5
    (change,) = refused(guarded, "temperature")
    assert change.name == "attribute 'body.temperature'"
    assert (change.old, change.new) == ("2.0", "0.5")
    assert "buffer" in change.remedy
    guarded.step.close()
    step = graphfsdp.capture(guarded.model, guarded.optim, warmup_steps=1)
    for _ in range(4):
        step(guarded.batch())
    assert step.report().num_calls["replay"] == 2
