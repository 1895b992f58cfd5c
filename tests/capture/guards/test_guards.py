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
from guard_net import refused, start
from helpers import assert_same_state, same_bits

ATTRIBUTE, ADDRESS, STRUCTURE = ChangeKind.ATTRIBUTE, ChangeKind.ADDRESS, ChangeKind.STRUCTURE


def moved(tensor: Tensor) -> None:
    """Move a tensor to other memory, with equal contents."""
    tensor.data = tensor.data.clone()


def transposed(tensor: Tensor) -> None:
    tensor.data = tensor.data.t()


def replaced(module: Any, name: str) -> None:
    """Replace a tensor by another object with equal contents."""
    old = getattr(module, name)
    new = old.detach().clone()
    setattr(module, name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)


def reverse_layers(model: Any) -> None:
    table = model.body.layers._modules
    for name in reversed(list(table)):
        table[name] = table.pop(name)


MODEL_CHANGES: dict[str, tuple[Callable[[Any], Any], str, ChangeKind]] = {
    "eval": (
        lambda m: m.eval(),
        r"the model \(with 6 modules in it\) was in train .* now in eval .*model\.train\(\)",
        ChangeKind.MODE,
    ),
    "eval_of_one": (
        lambda m: m.body.dropout.eval(),
        r"module 'body\.dropout' was in train .*body\.dropout\.train\(\)",
        ChangeKind.MODE,
    ),
    "dropout_rate": (
        lambda m: setattr(m.body.dropout, "p", 0.5),
        r"attribute 'body\.dropout\.p' was 0\.25 .* now 0\.5",
        ATTRIBUTE,
    ),
    "generator": (
        lambda m: setattr(m.body, "noise", torch.Generator()),
        r"attribute 'body\.noise' was <torch",
        ATTRIBUTE,
    ),
    "forward": (
        lambda m: setattr(m.body.dropout, "forward", lambda x: x),
        r"'body\.dropout\.forward'",
        ATTRIBUTE,
    ),
    "parameter_moved": (
        lambda m: moved(m.body.layers[1].weight),
        r"parameter 'body\.layers\.1\.weight' was at address 0x\w+ .* in other memory",
        ADDRESS,
    ),
    "frozen_parameter_moved": (lambda m: moved(m.frozen), "parameter 'frozen'", ADDRESS),
    "buffer_moved": (lambda m: moved(m.body.table), r"buffer 'body\.table'", ADDRESS),
    "parameter_replaced": (
        lambda m: replaced(m.body.layers[0], "bias"),
        r"parameter 'body\.layers\.0\.bias' was one tensor .* another one, in other memory",
        STRUCTURE,
    ),
    "buffer_replaced": (
        lambda m: replaced(m.body.norm, "running_mean"),
        r"buffer 'body\.norm\.running_mean'",
        STRUCTURE,
    ),
    "attribute_replaced": (lambda m: replaced(m.body, "plain"), r"'body\.plain'", ATTRIBUTE),
    "strides": (
        lambda m: transposed(m.body.layers[0].weight),
        r"'body\.layers\.0\.weight' was of stride \(4, 1\) .* now of stride \(1, 4\)",
        ChangeKind.LAYOUT,
    ),
    "frozen": (
        lambda m: m.body.layers[0].weight.requires_grad_(False),
        r"'body\.layers\.0\.weight' was trained .* now frozen.*requires_grad_\(True\)",
        ChangeKind.REQUIRES_GRAD,
    ),
    "module_replaced": (
        lambda m: setattr(m.body, "dropout", nn.Identity()),
        r"module 'body\.dropout' was a Dropout .* now a Identity",
        STRUCTURE,
    ),
    "module_replaced_by_one_of_its_kind": (
        lambda m: setattr(m.body, "dropout", nn.Dropout(0.75)),
        r"'body\.dropout' was a Dropout\(p=0.* now another object, a Dropout\(p=0.75.*in place",
        STRUCTURE,
    ),
    "module_added": (
        lambda m: m.body.layers.append(nn.Linear(4, 4)),
        r"module 'body\.layers\.2' was absent",
        STRUCTURE,
    ),
    "module_removed": (
        lambda m: m.body.layers._modules.pop("1"),
        r"'body\.layers\.1' was a Linear .* absent",
        STRUCTURE,
    ),
    "buffer_added": (
        lambda m: m.body.norm.register_buffer("extra", torch.zeros(1)),
        r"'body\.norm\.extra'",
        STRUCTURE,
    ),
    "parameter_added": (
        lambda m: m.body.register_parameter("late", nn.Parameter(torch.zeros(3))),
        r"parameter 'body\.late'",
        STRUCTURE,
    ),
    "modules_reversed": (
        reverse_layers,
        r"the order of the modules in 'body\.layers' was 0, 1 .* is now 1, 0",
        STRUCTURE,
    ),
    "parameter_removed": (
        lambda m: setattr(m.body.layers[1], "bias", None),
        r"parameter 'body\.layers\.1\.bias' was a Parameter .* now None",
        STRUCTURE,
    ),
}


@pytest.mark.parametrize("name", MODEL_CHANGES)
def test_a_change_of_the_model_is_refused_by_name(name: str) -> None:
    apply, match, kind = MODEL_CHANGES[name]
    guarded = start()
    apply(guarded.model)
    changes = refused(guarded, match)
    assert [change.kind for change in changes] == [kind]
    guarded.step.close()


def test_replays_go_on_as_if_nothing_had_been_where_changes_are_taken_back() -> None:
    guarded, undisturbed = start(), start()
    model: Any = guarded.model
    weight, dropout = model.frozen.data, model.body.dropout
    changes: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "in eval": (model.eval, model.train),
        "'frozen' was at": (
            lambda: moved(model.frozen),
            lambda: setattr(model.frozen, "data", weight),
        ),
        "of stride": (lambda: transposed(model.body.layers[0].weight),) * 2,
        "'body.dropout'": (
            lambda: setattr(model.body, "dropout", nn.Dropout(0.5)),
            lambda: setattr(model.body, "dropout", dropout),
        ),
        "order": (lambda: reverse_layers(model),) * 2,
        "'body.late'": (
            lambda: model.body.register_buffer("late", torch.zeros(3)),
            lambda: delattr(model.body, "late"),
        ),
    }
    for match, (change, take_back) in changes.items():
        change()
        refused(guarded, match)
        take_back()
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
