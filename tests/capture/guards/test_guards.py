"""What a graph has baked in is compared before each replay, named when it changed, and free again.

Each change is made between two replays. The replay must be refused with the exact thing named, and
nothing may have run. Where the change can be taken back, replays go on as if nothing had been.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import graphfsdp
from graphfsdp import ChangeKind
from graphfsdp.optim import FusedAdam
from guard_net import Body, Guarded, refused, start
from helpers import assert_same_state, same_bits


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


def reverse_layers(run: Guarded) -> None:
    table = run.body.layers._modules
    for name in reversed(list(table)):
        table[name] = table.pop(name)


class OtherLinear(nn.Linear):
    """A class to exchange a module's class for."""


def state_of(run: Guarded) -> dict[str, Any]:
    found: dict[str, Any] = run.optim.state[run.model.scale]
    return found


def in_another_table(run: Guarded) -> None:
    """Add a parameter to a table that has taken another one's place before."""
    run.body._parameters = dict(run.body._parameters)
    run.step(run.batch())
    run.body._parameters["late"] = nn.Parameter(torch.ones(1))


def in_other_state(run: Guarded) -> None:
    run.optim.state[run.model.scale] = dict(state_of(run))
    run.step(run.batch())
    state_of(run)["exp_avg"] = torch.zeros(())


def after_a_write(run: Guarded) -> None:
    """Write what does not matter first, so that all dicts of the model are asked once more."""
    vars(run.model)["epoch"] = 1
    run.step(run.batch())
    run.body.temperature = 3.0


def sets(name: str, value: Any) -> Callable[[Guarded], None]:
    """Return a change of an attribute of the body, or of what it holds."""
    path, _, last = name.rpartition(".")
    return lambda run: setattr(run.body.get_submodule(path), last, value)


CHANGES: dict[ChangeKind, dict[str, tuple[Callable[[Guarded], Any], str]]] = {
    ChangeKind.MODE: {
        "eval": (
            lambda run: run.model.eval(),
            r"the model \(with 6 modules in it\) was in train .* now in eval .*model\.train\(\)",
        ),
        "eval of one": (
            lambda run: run.body.dropout.eval(),
            r"module 'body\.dropout' was in train .*body\.dropout\.train\(\)",
        ),
    },
    ChangeKind.ATTRIBUTE: {
        "dropout rate": (sets("dropout.p", 0.5), r"'body\.dropout\.p' was 0\.25 .* now 0\.5"),
        "generator": (sets("noise", torch.Generator()), r"attribute 'body\.noise' was <torch"),
        "forward": (sets("dropout.forward", lambda x: x), r"'body\.dropout\.forward'"),
        "tensor replaced": (lambda run: replaced(run.body, "plain"), r"'body\.plain'"),
        "derived class": (
            sets("layers.0.__class__", OtherLinear),
            r"class of 'body\.layers\.0' was Linear",
        ),
        "behind": (
            lambda run: object.__setattr__(run.body, "temperature", 3.0),
            r"'body\.temperature' was 2\.0",
        ),
        "deleted": (lambda run: delattr(run.body, "temperature"), "'body.temperature' .*missing"),
        "after a write": (after_a_write, r"'body\.temperature' was 2\.0"),
        "list item": (
            lambda run: run.body.numbers.__setitem__(0, 9.0),
            r"0 of attribute 'body\.numbers' was 2\.0 .* now 9\.0",
        ),
        "dict grown": (
            lambda run: run.body.options.update(new=9.0),
            r"'new' of attribute 'body\.options' was missing",
        ),
        "tensor of a list": (
            lambda run: run.body.tensors.__setitem__(0, torch.ones(4)),
            r"0 of attribute 'body\.tensors'",
        ),
        "object": (
            lambda run: setattr(run.body.data, "gain", 9.0),
            r"'gain' of attribute 'body\.data' was 2\.0",
        ),
        "function": (sets("function", torch.sin), r"'body\.function' was one function"),
        "none": (sets("nothing", 9.0), r"'body\.nothing' was None .* now 9\.0"),
        "shadow": (sets("at_class", 9.0), r"'body\.at_class' was missing .* now 9\.0"),
        "criterion": (
            lambda run: setattr(run.around, "criterion", nn.BCEWithLogitsLoss()),
            "'criterion' .* was one BCEWithLogitsLoss",
        ),
        "criterion of another class": (
            lambda run: setattr(run.around, "criterion", nn.MSELoss()),
            "'criterion' .* was a BCEWithLogitsLoss .* now a MSELoss",
        ),
        "setting of a criterion": (
            lambda run: setattr(run.around.criterion, "reduction", "sum"),
            "attribute 'BCEWithLogitsLoss.reduction' was 'mean' .* now 'sum'",
        ),
        "forward of a teacher's layer": (
            lambda run: setattr(run.around.teacher[2], "forward", run.around.teacher[2].forward),
            r"'Sequential\.2\.forward'",
        ),
        "hook of a teacher": (
            lambda run: run.around.teacher.register_forward_hook(lambda *args: None),
            "forward hook .* of module 'Sequential'",
        ),
        "mode of a teacher": (
            lambda run: run.around.teacher.train(),
            "module 'Sequential.*in eval",
        ),
        "weight of a teacher": (
            lambda run: moved(run.around.teacher[0].weight),
            r"parameter 'Sequential\.0\.weight' outside of the model was at address",
        ),
        "part of a teacher": (
            lambda run: run.around.teacher.add_module("0", nn.Linear(4, 4)),
            r"module 'Sequential\.0' outside of the model was a Linear",
        ),
        "weight of a criterion": (
            lambda run: setattr(run.around.criterion, "pos_weight", torch.full((1,), 5.0)),
            r"buffer 'BCEWithLogitsLoss\.pos_weight' outside of the model was one tensor",
        ),
    },
    ChangeKind.ADDRESS: {
        "parameter": (
            lambda run: moved(run.body.layers[1].weight),
            r"parameter 'body\.layers\.1\.weight' was at address 0x\w+ .* in other memory",
        ),
        "frozen parameter": (lambda run: moved(run.model.frozen), "parameter 'frozen'"),
        "buffer": (lambda run: moved(run.body.table), r"buffer 'body\.table'"),
    },
    ChangeKind.LAYOUT: {
        "strides": (
            lambda run: transposed(run.body.layers[0].weight),
            r"'body\.layers\.0\.weight' was of stride \(4, 1\) .* now of stride \(1, 4\)",
        ),
    },
    ChangeKind.REQUIRES_GRAD: {
        "frozen": (
            lambda run: run.body.layers[0].weight.requires_grad_(False),
            r"'body\.layers\.0\.weight' was trained .* now frozen.*requires_grad_\(True\)",
        ),
    },
    ChangeKind.STRUCTURE: {
        "parameter replaced": (
            lambda run: replaced(run.body.layers[0], "bias"),
            r"parameter 'body\.layers\.0\.bias' was one tensor .* another one, in other memory",
        ),
        "module replaced": (
            sets("dropout", nn.Identity()),
            r"module 'body\.dropout' was a Dropout .* now a Identity",
        ),
        "module replaced by one of its kind": (
            sets("dropout", nn.Dropout(0.75)),
            r"'body\.dropout' was a Dropout\(p=0.* now another object, a Dropout\(p=0.75.*in place",
        ),
        "module removed": (
            lambda run: run.body.layers._modules.pop("1"),
            r"'body\.layers\.1' was a Linear .* absent",
        ),
        "buffer added": (
            lambda run: run.body.norm.register_buffer("extra", torch.zeros(1)),
            r"'body\.norm\.extra'",
        ),
        "modules reversed": (
            reverse_layers,
            r"the order of the modules in 'body\.layers' was 0, 1 .* is now 1, 0",
        ),
        "parameter removed": (
            sets("layers.1.bias", None),
            r"parameter 'body\.layers\.1\.bias' was a Parameter .* now None",
        ),
        "table": (sets("_buffers", {}), r"buffer 'body\.table' was .*absent"),
        "another table": (in_another_table, r"parameter 'body\.late' was absent"),
    },
    ChangeKind.OPTIMIZER_STATE: {
        "other state": (in_other_state, "optimizer state 'exp_avg' of 'scale'"),
    },
    ChangeKind.GROUPS: {
        "reversed": (lambda run: run.optim.param_groups[0]["params"].reverse(), "group 0"),
    },
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, changes in CHANGES.items() for name in changes]
)
def test_a_change_is_refused_by_name(kind: ChangeKind, name: str) -> None:
    change, match = CHANGES[kind][name]
    guarded = start()
    change(guarded)
    assert {change.kind for change in refused(guarded, match)} == {kind}
    guarded.step.close()


def assign(new: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
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


MOVES: dict[str, Callable[[Any], Any]] = {
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


@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, "body.plain") for name in MOVES), ("other memory", "body.tensors")],
)
def test_each_change_of_a_tensor_is_seen(name: str, where: str) -> None:
    guarded = start()
    MOVES[name](guarded.body.plain if where == "body.plain" else guarded.body.tensors[0])
    changes = refused(guarded, where)
    assert len({change.name for change in changes}) == 1
    guarded.step.close()


@pytest.mark.parametrize(
    ("owner", "name", "value", "match"),
    [
        (Body, "at_class", 9.0, r"Body\.at_class was 1\.0 .* now 9\.0"),
        (Body, "forward", lambda model, x: x, r"Body\.forward was one function"),
        (Body, "scale", classmethod(lambda cls: 3.0), r"Body\.scale was"),
        (FusedAdam, "step", lambda optimizer: None, r"FusedAdam\.step was one function"),
    ],
)
def test_what_a_class_holds_is_guarded(
    owner: type, name: str, value: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = start()
    monkeypatch.setattr(owner, name, value)
    refused(guarded, match)


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
        "of stride": (partial(transposed, model.body.layers[0].weight),) * 2,
        "'body.dropout'": (
            lambda: setattr(model.body, "dropout", nn.Dropout(0.5)),
            lambda: setattr(model.body, "dropout", dropout),
        ),
        "order": (partial(reverse_layers, guarded),) * 2,
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
    parametrize.register_parametrization(guarded.body.layers[0], "weight", nn.Tanh())
    names = {change.name for change in refused(guarded, r"module 'body\.layers\.0\.parametriz")}
    assert "parameter 'body.layers.0.weight'" in names


@pytest.mark.parametrize("how", ["to", "assign"])
def test_a_moved_model_is_refused_with_all_its_tensors(how: str) -> None:
    guarded = start()
    model = guarded.model
    if how == "assign":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    else:
        model.to(torch.float64)
    changes = refused(guarded, "in other memory")
    text = "\n".join(map(str, changes))
    for name, _ in model.named_parameters():
        assert repr(name) in text


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
