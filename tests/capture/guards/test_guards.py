"""What a graph has baked in is compared before each replay, named when it changed, and free again.

Of a model, an optimizer, their hooks, and torch's switches. Each change is made between two
replays. The replay must be refused with the exact thing named, and nothing may have run. Where the
change can be taken back, replays go on as if nothing had been.
"""

import copy
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: F401  (in HOOKS)

import graphfsdp
from graphfsdp import ChangeKind
from graphfsdp.optim import FusedAdam
from guard_net import Guarded, refused, start
from helpers import assert_same_state, same_bits
from ranks import on_ranks


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

# Of both optimizers; "state" is that of this weight.
WEIGHT = r"'body\.layers\.0\.weight'"
OF_OPTIMIZERS = {
    ChangeKind.OPTIMIZER_STATE: {
        "state['exp_avg'] = state['exp_avg'].clone()": f"'exp_avg' of {WEIGHT}",
        "state['step'] = state['step'].clone()": f"'step' of {WEIGHT}",
        "state['extra'] = torch.zeros(2)": f"'extra' of {WEIGHT} was missing .* now a Tensor",
        "optim.state.clear()": f"'exp_avg' of {WEIGHT} was a Tensor .* missing",
    },
    ChangeKind.ADDRESS: {
        "state['exp_avg_sq'].data = torch.zeros(4, 4)": (
            f"'exp_avg_sq' of {WEIGHT} was at address 0x.* in other memory"
        ),
    },
    ChangeKind.GROUPS: {
        "optim.param_groups[0]['params'].pop()": (
            r"group 0 of \w+ was of 7 parameters \(with body\.norm\.bias\) .* now of 6"
        ),
        "optim.param_groups[0]['params'][-1] = nn.Parameter(torch.ones(4))": (
            r"with body\.norm\.bias\) .* \(with an unknown one"
        ),
        "optim.add_param_group({'params': [nn.Parameter(torch.ones(4))]})": (
            r"was of 1 groups .* now of 2"
        ),
    },
}


@pytest.mark.parametrize(
    ("optimizer", "kind", "change", "words"),
    [
        (optimizer, kind, change, words)
        for optimizer, table in (
            *(("fused_adam", CHANGES), ("fused_adam", OF_OPTIMIZERS), ("adamw", OF_OPTIMIZERS)),
        )
        for kind, changes in table.items()
        for change, words in changes.items()
    ],
)
def test_a_change_is_refused_by_name(
    optimizer: str, kind: ChangeKind, change: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = start(optimizer)
    state = guarded.optim.state[guarded.body.layers[0].weight]
    guarded.does(change, globals() | {"patch": monkeypatch, "state": state})
    assert {each.kind for each in refused(guarded, words)} == {kind}
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


class OwnRates(torch.optim.Optimizer):
    """Has a rate for each parameter, a number of Python in its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for param in self.param_groups[0]["params"]:
            self.state[param]["rate"] = 0.1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=self.state[param]["rate"])


def test_a_number_in_a_state_that_was_recorded_is_guarded() -> None:
    model = nn.Linear(4, 1)
    optimizer = OwnRates(model.parameters())
    with graphfsdp.capture(model, optimizer, loss_fn=lambda m, x: m(x).sum()) as step:
        for _ in range(5):
            step(torch.ones(2, 4))
        optimizer.state[model.bias]["rate"] = 0.2
        with pytest.raises(graphfsdp.GuardError, match=r"'rate' of 'bias' was 0\.1.* now 0\.2"):
            step(torch.ones(2, 4))
        optimizer.state[model.bias]["rate"] = 0.1
        step(torch.ones(2, 4))


def test_the_optimizer_is_free_where_it_stays_eager() -> None:
    guarded = start("adamw", scope="forward_backward")
    guarded.optim.load_state_dict(copy.deepcopy(guarded.optim.state_dict()))
    guarded.optim.register_step_post_hook(lambda *args: None)
    guarded.optim.param_groups[0]["weight_decay"] = 0.5  # which a graph would hold
    guarded.step(guarded.batch())
    assert guarded.step.report().num_calls["replay"] == 2


def a_hook(*args: Any) -> None:
    """Do nothing."""


# What returns the handle of a hook, or a context in which a switch is on; and how it is told.
HOOKS = {
    "body.norm.register_forward_hook(a_hook)": (
        r"forward hook 'a_hook' \(.*test_guards\.py:\d+\) of module 'body\.norm'"
    ),
    "model.register_forward_pre_hook(a_hook)": (
        "forward pre-hook 'a_hook' .* of the model was absent .* now registered"
    ),
    "body.norm.register_full_backward_hook(a_hook)": (
        "backward hook 'a_hook' .* of module 'body.norm'"
    ),
    "body.norm.register_full_backward_pre_hook(a_hook)": (
        "backward pre-hook 'a_hook' .* of module 'body.norm'"
    ),
    "model.scale.register_hook(a_hook)": "gradient hook 'a_hook' .* of parameter 'scale'",
    "model.scale.register_post_accumulate_grad_hook(a_hook)": (
        "post-accumulate-grad hook 'a_hook' .* of parameter 'scale'"
    ),
    "optim.register_step_pre_hook(a_hook)": "step pre-hook 'a_hook' .* of FusedAdam",
    "optim.register_step_post_hook(a_hook)": "step post-hook 'a_hook' .* of FusedAdam",
    "nn.modules.module.register_module_forward_hook(a_hook)": (
        "forward hook 'a_hook' .* of all modules"
    ),
    "nn.modules.module.register_module_full_backward_hook(a_hook)": (
        "backward hook 'a_hook' .* of all modules"
    ),
    "register_optimizer_step_post_hook(a_hook)": "step post-hook 'a_hook' .* of all optimizers",
}


@contextmanager
def switched(switch: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(back)


SWITCHES = {
    "switched(torch.set_default_dtype, torch.float64, torch.float32)": (
        r"the default dtype was torch\.float32 .* now torch\.float64"
    ),
    "switched(torch.use_deterministic_algorithms, True, False)": (
        r"torch\.use_deterministic_algorithms was off .* now on"
    ),
    "switched(torch.set_float32_matmul_precision, 'medium', 'highest')": (
        "the float32 precision of mkldnn matmul was ieee .* now bf16"
    ),
    "switched(torch.backends.cuda.enable_math_sdp, False, True)": (
        "math attention was on .* now off"
    ),
    "switched(torch.backends.cuda.enable_flash_sdp, False, True)": "flash attention was on",
    "torch.autocast('cpu')": "autocast on cpu was off .* now on",
}


@pytest.fixture(scope="module")
def guarded() -> Guarded:
    """Return a step of which all changes are taken back."""
    return start()


@pytest.mark.parametrize("change", [*HOOKS, *SWITCHES])
def test_a_hook_or_a_switch_of_torch_is_refused_by_name_until_it_is_off(
    change: str, guarded: Guarded
) -> None:
    with guarded.does(change, globals()):
        kinds = {each.kind for each in refused(guarded, (HOOKS | SWITCHES)[change])}
    assert kinds == {ChangeKind.HOOK if change in HOOKS else ChangeKind.SETTING}
    guarded.step(guarded.batch())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_removed_hooks_are_refused_by_name() -> None:
    guarded = start(num_calls=0)
    with ExitStack() as hooks:
        handles = [hooks.enter_context(guarded.does(each, globals())) for each in HOOKS]
        for _ in range(5):
            guarded.step(guarded.batch())
        seen: set[str] = set()
        for match, handle in zip(HOOKS.values(), handles, strict=True):
            handle.remove()
            changes = refused(guarded, "was registered .* now removed")
            (new,) = {str(change) for change in changes} - seen
            assert re.search(match.partition(" was absent")[0], new)
            assert {change.kind for change in changes} == {ChangeKind.HOOK}
            seen.add(new)


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ({}, {"enabled": False}, "autocast on cpu was on .* now off"),
        (
            {"dtype": torch.bfloat16},
            {"dtype": torch.float16},
            r"autocast's dtype on cpu was torch\.bfloat16 .* now torch\.float16",
        ),
    ],
)
def test_another_autocast_is_refused_by_name(
    then: dict[str, Any], now: dict[str, Any], words: str
) -> None:
    with torch.autocast("cpu", **then):
        guarded = start()
    with torch.autocast("cpu", **now):
        assert {change.kind for change in refused(guarded, words)} == {ChangeKind.SETTING}
    with torch.autocast("cpu", **then):
        guarded.step(guarded.batch())


# A change, how it is undone, and how it is told.
OF_SHARDS = (
    (
        "rows.data = rows.data.clone()",
        "rows.data = data",
        r"parameter '0\.weight' was at address .* in other memory",
    ),
    (
        "weight._local_tensor = rows.clone()",
        "weight._local_tensor = rows",
        r"parameter '0\.weight' was at address .* in other memory",
    ),
    (
        "weight.requires_grad_(False)",
        "weight.requires_grad_(True)",
        r"parameter '0\.weight' was trained .* now frozen",
    ),
    (
        "handle = weight.register_hook(print)",
        "handle.remove()",
        r"gradient hook .* of parameter '0\.weight'",
    ),
    (
        "model.set_gradient_divide_factor(4.0)",
        "model.set_gradient_divide_factor(3.0)",
        r"gradient_divide_factor",
    ),
    *(
        (f"model.{setter}(False)", f"model.{setter}(True)", f"{name} of .* was on .* now off")
        for setter, name in (
            ("set_requires_gradient_sync", "requires_gradient_sync"),
            ("set_is_last_backward", "is_last_microbatch"),
            ("set_requires_all_reduce", "requires_all_reduce"),
        )
    ),
)


@on_ranks("ranks1")
def test_changes_of_a_sharded_model_are_refused_by_name() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    graphfsdp.fully_shard(model).set_gradient_divide_factor(3.0)
    optim = FusedAdam(model.parameters(), lr=0.01)
    x = torch.randn(5, 4)
    with graphfsdp.capture(model, optim, loss_fn=lambda model, x: model(x).square().mean()) as step:
        for _ in range(5):
            step(x)
        with torch.no_grad():
            model(x)
        weight = model[0].weight
        names = {"model": model, "weight": weight, "rows": weight._local_tensor}
        names["data"] = names["rows"].data
        for change, undo, match in OF_SHARDS:
            exec(change, names)
            with pytest.raises(graphfsdp.GuardError, match=match) as caught:
                step(x)
            assert len(caught.value.changes) == 1, caught.value
            exec(undo, names)
            step(x)
        assert step.report().num_calls["replay"] == 1 + len(OF_SHARDS)
