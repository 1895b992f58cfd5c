"""What a graph has baked in is compared before each replay, named when it changed, and free again.

Each change is made between two replays. The replay must be refused with the exact thing named, and
nothing may have run. Where the change can be taken back, replays go on as if nothing had been.
"""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn  # noqa: F401  (nn in CHANGES)

import graphfsdp
from graphfsdp import ChangeKind
from guard_net import refused, start
from helpers import assert_same_state, same_bits


def moved(tensor: Tensor) -> None:
    """Move a tensor to other memory, with equal contents."""
    tensor.data = tensor.data.clone()


def transposed(tensor: Tensor) -> None:
    tensor.data = tensor.data.t()


def reversed_in(table: dict[str, Any]) -> None:
    for name in reversed(list(table)):
        table[name] = table.pop(name)


# What is done between two replays, and how it is told.
CHANGES = {
    ChangeKind.MODE: {
        "model.eval()": r"the model was in train .* now in eval .*model\.train\(\)",
        "body.layers[1].eval()": r"call model\.get_submodule\('body\.layers\.1'\)\.train\(\)",
    },
    ChangeKind.ATTRIBUTE: {
        "body.dropout.p = 0.5": r"'body\.dropout\.p' was 0\.25 .* now 0\.5",
        "body.noise = torch.Generator()": r"attribute 'body\.noise' was <torch",
        "body.dropout.forward = lambda x: x": r"'body\.dropout\.forward'.*replace functions before",
        "body.plain = body.plain.clone()": r"'body\.plain'",
        "object.__setattr__(body, 'temperature', 3.0)": r"'body\.temperature' was 2\.0",
        "del body.temperature": "'body.temperature' .*missing",
        # What does not matter first, so that all dicts of the model are asked once more.
        "vars(model)['epoch'] = 1; step(batch()); body.temperature = 3.0": (
            r"'body\.temperature' was 2\.0"
        ),
        "body.numbers[0] = 9.0": r"0 of attribute 'body\.numbers' was 2\.0 .* now 9\.0",
        "body.options['new'] = 9.0": r"'new' of attribute 'body\.options' was missing",
        "body.tensors[0] = torch.ones(4)": r"0 of attribute 'body\.tensors'",
        "body.data.gain = 9.0": r"'gain' of attribute 'body\.data' was 2\.0",
        "body.function = torch.sin": r"'body\.function' was one function",
        "body.nothing = 9.0": r"'body\.nothing' was None .* now 9\.0",
        "body.at_class = 9.0": r"'body\.at_class' was missing .* now 9\.0",
        "patch.setattr('guard_net.Body.at_class', 9.0)": r"Body\.at_class was 1\.0 .* now 9\.0",
        "patch.setattr('guard_net.Body.forward', lambda model, x: x)": r"Body\.forward was one f",
        "patch.setattr('guard_net.Body.scale', classmethod(lambda cls: 3.0))": r"Body\.scale was",
        "around.criterion = nn.BCEWithLogitsLoss()": "'criterion' .* was one BCEWithLogitsLoss",
        "around.criterion = nn.MSELoss()": (
            "'criterion' .* was a BCEWithLogitsLoss .* now a MSELoss"
        ),
        "around.criterion.reduction = 'sum'": (
            "attribute 'BCEWithLogitsLoss.reduction' was 'mean' .* now 'sum'"
        ),
        "around.criterion.pos_weight = torch.full((1,), 5.0)": (
            r"buffer 'BCEWithLogitsLoss\.pos_weight' outside of the model was one Tensor"
        ),
        "around.teacher[2].forward = around.teacher[2].forward": r"'Sequential\.2\.forward'",
        "around.teacher.register_forward_hook(print)": "forward hook .* of module 'Sequential'",
        "around.teacher.train()": "module 'Sequential.*in eval",
        "moved(around.teacher[0].weight)": (
            r"parameter 'Sequential\.0\.weight' outside of the model was at address"
        ),
        "around.teacher[0] = nn.Linear(4, 4)": (
            r"module 'Sequential\.0' outside of the model was one Linear"
        ),
    },
    ChangeKind.ADDRESS: {
        "moved(body.layers[1].weight)": (
            r"parameter 'body\.layers\.1\.weight' was at address 0x\w+ .* in other memory"
        ),
        "moved(model.frozen)": "parameter 'frozen'",
        "moved(body.table)": r"buffer 'body\.table'",
    },
    ChangeKind.LAYOUT: {
        "transposed(body.layers[0].weight)": (
            r"'body\.layers\.0\.weight' was of stride \(4, 1\) .* now of stride \(1, 4\)"
        ),
    },
    ChangeKind.REQUIRES_GRAD: {
        "body.layers[0].weight.requires_grad_(False)": (
            r"'body\.layers\.0\.weight' was trained .* now frozen.*requires_grad_\(True\)"
        ),
    },
    ChangeKind.STRUCTURE: {
        "body.layers[0].bias = nn.Parameter(body.layers[0].bias.detach().clone())": (
            r"parameter 'body\.layers\.0\.bias' was one Parameter .* another Parameter"
        ),
        "body.dropout = nn.Identity()": (r"module 'body\.dropout' was a Dropout .* now a Identity"),
        "body.dropout = nn.Dropout(0.75)": (
            r"'body\.dropout' was one Dropout .* now another Dropout"
        ),
        "del body.layers._modules['1']": r"'body\.layers\.1' was a Linear .* missing",
        "body.norm.register_buffer('extra', torch.zeros(1))": r"'body\.norm\.extra'",
        "reversed_in(body.layers._modules)": (
            r"the order of the modules in 'body\.layers' was 0, 1 .* is now 1, 0"
        ),
        "body.layers[1].bias = None": (
            r"parameter 'body\.layers\.1\.bias' was a Parameter .* now None"
        ),
        "body._buffers = {}": r"buffer 'body\.table' was .*missing",
        # A table that has taken another one's place before.
        "body._parameters = dict(body._parameters); step(batch());"
        "body._parameters['late'] = nn.Parameter(torch.ones(1))": (
            r"parameter 'body\.late' was missing"
        ),
    },
    ChangeKind.OPTIMIZER_STATE: {
        "optim.state[model.scale] = dict(optim.state[model.scale]); step(batch());"
        "optim.state[model.scale]['exp_avg'] = torch.zeros(())": (
            "optimizer state 'exp_avg' of 'scale'"
        ),
    },
    ChangeKind.GROUPS: {"optim.param_groups[0]['params'].reverse()": "group 0.*in another order"},
}


@pytest.mark.parametrize(
    ("kind", "change"), [(kind, change) for kind, changes in CHANGES.items() for change in changes]
)
def test_a_change_is_refused_by_name(
    kind: ChangeKind, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = start()
    guarded.does(change, globals() | {"patch": monkeypatch})
    assert {each.kind for each in refused(guarded, CHANGES[kind][change])} == {kind}
    guarded.step.close()


def set_other(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.zeros(tensor.shape, dtype=tensor.dtype))  # type: ignore[call-overload]


def swapped(tensor: Tensor) -> None:
    torch.utils.swap_tensors(tensor, torch.zeros_like(tensor))
    gc.collect()  # what was swapped out is freed


MOVES = (
    "moved(tensor)",
    "set_other(tensor)",
    "tensor.data = data.as_strided(data.shape, data.stride(), data.storage_offset() + 1)",
    "swapped(tensor)",
    "tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + (1 << 22))",
    "tensor.data = data.view(torch.int32)",
    "tensor.data = data.unsqueeze(0)",
    "tensor.data = data.unsqueeze(-1)",
    "tensor.data = data.narrow(0, 0, data.shape[0] - 1)",
    "tensor.data = data.as_strided(data.shape, [2] * data.dim())",
    "tensor.data = data.select(0, 0)",
    "tensor.requires_grad_()",
)


@pytest.mark.parametrize(
    ("change", "where"),
    [*((change, "body.plain") for change in MOVES), ("moved(tensor)", "body.tensors[0]")],
)
def test_each_change_of_a_tensor_is_seen(change: str, where: str) -> None:
    guarded = start()
    tensor = guarded.does(where, {})
    guarded.does(change, globals() | {"tensor": tensor, "data": tensor.data})
    assert len({each.name for each in refused(guarded, where.removesuffix("[0]"))}) == 1
    guarded.step.close()


def test_replays_go_on_as_if_nothing_had_been_where_changes_are_taken_back() -> None:
    guarded, undisturbed = start(), start()
    weight, dropout = guarded.model.frozen.data, guarded.body.dropout
    for words, change, take_back in (
        ("in eval", "model.eval()", "model.train()"),
        ("'frozen' was at", "moved(model.frozen)", "model.frozen.data = weight"),
        ("of stride", *["transposed(body.layers[0].weight)"] * 2),
        ("'body.dropout'", "body.dropout = nn.Dropout(0.5)", "body.dropout = dropout"),
        ("order", *["reversed_in(body.layers._modules)"] * 2),
        ("'body.late'", "body.register_buffer('late', torch.zeros(3))", "del body.late"),
    ):
        names = globals() | {"weight": weight, "dropout": dropout}
        guarded.does(change, names)
        refused(guarded, words)
        guarded.does(take_back, names)
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


def test_several_changes_are_all_named() -> None:
    guarded = start()
    guarded.body.dropout.eval()
    guarded.body.temperature = 1.0
    guarded.model.scale.requires_grad_(False)
    # Each in a line of its own, and the remedy in one behind them.
    said = r"(?s)not run:(\n  [^\n]+){3}\nRemedy: .*; or capture again, as \S+ does$"
    changes = refused(guarded, said)
    assert {change.kind for change in changes} == {
        ChangeKind.MODE,
        ChangeKind.ATTRIBUTE,
        ChangeKind.REQUIRES_GRAD,
    }
    assert len(changes) == 3
    for index in range(12):
        guarded.body.register_buffer(f"late{index}", torch.zeros(2))
    assert len(refused(guarded, r"(?s)'body\.late\d'.*and 7 more")) == 15


def test_a_refusal_can_be_followed_by_a_new_capture() -> None:
    guarded = start()
    guarded.body.temperature = 0.5
    (change,) = refused(guarded, "temperature")
    assert change.name == "attribute 'body.temperature'"
    assert (change.old, change.new) == ("2.0", "0.5")
    assert "buffer" in change.remedy
    guarded.step.close()
    step = graphfsdp.capture(guarded.model, guarded.optim, warmup_steps=1)
    for _ in range(4):
        step(guarded.batch())
    assert step.report().num_calls["replay"] == 2
