"""Changed optimizer state and groups, hooks and torch's switches are refused by name."""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: F401  (in HOOKS)

import graphfsdp
from graphfsdp import ChangeKind
from guard_net import Guarded, refused, start

# What is done between two replays, and how it is told; "state" is that of this weight.
WEIGHT = r"'body\.layers\.0\.weight'"
CHANGES = {
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


@pytest.mark.parametrize("optimizer", ["fused_adam", "adamw"])
@pytest.mark.parametrize(
    ("kind", "change"), [(kind, change) for kind, changes in CHANGES.items() for change in changes]
)
def test_a_change_of_the_optimizer_is_refused_by_name(
    kind: ChangeKind, change: str, optimizer: str
) -> None:
    guarded = start(optimizer)
    state = guarded.optim.state[guarded.body.layers[0].weight]
    guarded.does(change, globals() | {"state": state})
    assert {each.kind for each in refused(guarded, CHANGES[kind][change])} == {kind}
    guarded.step.close()


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
    guarded.step(guarded.batch())
    assert guarded.step.report().num_calls["replay"] == 2


def test_a_gradient_that_was_moved_stays_the_users() -> None:
    guarded, twin = start(), start()
    param = guarded.body.layers[0].weight
    grad = param.grad
    grad.data = torch.full_like(grad, 7.0)
    x = guarded.batch()
    guarded.train(x)
    twin.train(x)
    assert grad.eq(7.0).all()
    assert torch.equal(param.grad, twin.body.layers[0].weight.grad)


def a_hook(*args: Any) -> None:
    """Do nothing."""


# What returns the handle of a hook, or a context in which a switch is on; and how it is told.
HOOKS = {
    "body.norm.register_forward_hook(a_hook)": (
        r"forward hook 'a_hook' \(.*test_guards_optimizer\.py:\d+\) of module 'body\.norm'"
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
