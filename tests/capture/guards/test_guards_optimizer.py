"""Changed optimizer state and groups, hooks and torch's switches are refused by name."""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import graphfsdp
from graphfsdp import ChangeKind
from guard_net import Guarded, refused, start
from helpers import assert_same_state, same_bits

ONES = torch.ones(4)


def first_state(guarded: Guarded) -> dict[str, Any]:
    state: dict[str, Any] = guarded.optim.state[guarded.body.layers[0].weight]
    return state


def loaded(guarded: Guarded) -> None:
    state = guarded.optim.state_dict()
    guarded.optim.load_state_dict(state | {"state": copy.deepcopy(state["state"])})


def replaced(run: Guarded, name: str) -> None:
    state = first_state(run)
    state[name] = state[name].clone()


STATE, GROUPS = ChangeKind.OPTIMIZER_STATE, ChangeKind.GROUPS
WEIGHT = r"'body\.layers\.0\.weight'"
CHANGES: dict[str, tuple[Callable[[Guarded], Any], str, ChangeKind]] = {
    "entry_replaced": (lambda run: replaced(run, "exp_avg"), f"'exp_avg' of {WEIGHT}", STATE),
    "count_replaced": (lambda run: replaced(run, "step"), f"'step' of {WEIGHT}", STATE),
    "entry_moved": (
        lambda run: setattr(first_state(run)["exp_avg_sq"], "data", torch.zeros(4, 4)),
        f"'exp_avg_sq' of {WEIGHT} was at address 0x.* in other memory",
        ChangeKind.ADDRESS,
    ),
    "entry_added": (
        lambda run: first_state(run).update(extra=torch.zeros(2)),
        f"'extra' of {WEIGHT} was absent .* now there",
        STATE,
    ),
    "cleared": (
        lambda run: run.optim.state.clear(),
        f"'exp_avg' of {WEIGHT} was there .* gone",
        STATE,
    ),
    "parameter_dropped": (
        lambda run: run.optim.param_groups[0]["params"].pop(),
        r"group 0 of \w+ was of 7 parameters \(with body\.norm\.bias\) .* now of 6",
        GROUPS,
    ),
    "parameter_exchanged": (
        lambda run: run.optim.param_groups[0]["params"].__setitem__(-1, nn.Parameter(ONES)),
        r"with body\.norm\.bias\) .* \(with an unknown one",
        GROUPS,
    ),
    "group_added": (
        lambda run: run.optim.add_param_group({"params": [nn.Parameter(ONES)]}),
        r"was of 1 groups .* now of 2",
        GROUPS,
    ),
    "step": (
        lambda run: setattr(run.optim, "step", a_hook),
        r"\w+\.step was one function",
        ChangeKind.ATTRIBUTE,
    ),
}


@pytest.mark.parametrize("optimizer", ["fused_adam", "adamw"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_optimizer_is_refused_by_name(name: str, optimizer: str) -> None:
    change, match, kind = CHANGES[name]
    guarded = start(optimizer)
    change(guarded)
    assert {change.kind for change in refused(guarded, match)} == {kind}
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


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_loading_is_no_change(name: str) -> None:
    guarded, twin = start(name), start(name)
    loaded(guarded)
    x = guarded.batch()
    assert same_bits(guarded.train(x), twin.train(x))
    assert_same_state(twin.snapshot(), guarded.snapshot())


def test_the_optimizer_is_free_where_it_stays_eager() -> None:
    guarded = start("adamw", scope="forward_backward")
    loaded(guarded)
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


HOOKS: dict[str, tuple[Callable[[Guarded], Any], str]] = {
    "forward": (
        lambda g: g.body.norm.register_forward_hook(a_hook),
        r"forward hook 'a_hook' \(.*test_guards_optimizer\.py:\d+\) of module 'body\.norm'",
    ),
    "forward_pre": (
        lambda g: g.model.register_forward_pre_hook(a_hook),
        "forward pre-hook 'a_hook' .* of the model was absent .* now registered",
    ),
    "backward": (
        lambda g: g.body.norm.register_full_backward_hook(a_hook),
        "backward hook 'a_hook' .* of module 'body.norm'",
    ),
    "backward_pre": (
        lambda g: g.body.norm.register_full_backward_pre_hook(a_hook),
        "backward pre-hook 'a_hook' .* of module 'body.norm'",
    ),
    "gradient": (
        lambda g: g.model.scale.register_hook(a_hook),
        "gradient hook 'a_hook' .* of parameter 'scale'",
    ),
    "accumulated": (
        lambda g: g.model.scale.register_post_accumulate_grad_hook(a_hook),
        "post-accumulate-grad hook 'a_hook' .* of parameter 'scale'",
    ),
    "step_pre": (
        lambda g: g.optim.register_step_pre_hook(a_hook),
        "step pre-hook 'a_hook' .* of FusedAdam",
    ),
    "step_post": (
        lambda g: g.optim.register_step_post_hook(a_hook),
        "step post-hook 'a_hook' .* of FusedAdam",
    ),
    "global_forward": (
        lambda g: torch_module.register_module_forward_hook(a_hook),
        "forward hook 'a_hook' .* of all modules",
    ),
    "global_backward": (
        lambda g: torch_module.register_module_full_backward_hook(a_hook),
        "backward hook 'a_hook' .* of all modules",
    ),
    "global_step": (
        lambda g: torch_optimizer.register_optimizer_step_post_hook(a_hook),
        "step post-hook 'a_hook' .* of all optimizers",
    ),
}


@contextmanager
def switched(switch: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(back)


SWITCHES: dict[str, tuple[Callable[[Guarded], Any], str]] = {
    "default_dtype": (
        lambda g: switched(torch.set_default_dtype, torch.float64, torch.float32),
        r"the default dtype was torch\.float32 .* now torch\.float64",
    ),
    "deterministic": (
        lambda g: switched(torch.use_deterministic_algorithms, True, False),
        r"torch\.use_deterministic_algorithms was off .* now on",
    ),
    "matmul_precision": (
        lambda g: switched(torch.set_float32_matmul_precision, "medium", "highest"),
        "the float32 precision of mkldnn matmul was ieee .* now bf16",
    ),
    "math_attention": (
        lambda g: switched(torch.backends.cuda.enable_math_sdp, False, True),
        "math attention was on .* now off",
    ),
    "flash_attention": (
        lambda g: switched(torch.backends.cuda.enable_flash_sdp, False, True),
        "flash attention was on",
    ),
    "autocast": (lambda g: torch.autocast("cpu"), "autocast on cpu was off .* now on"),
}


@pytest.fixture(scope="module")
def guarded() -> Guarded:
    """Return a step of which all changes are taken back."""
    return start()


@pytest.mark.parametrize("name", [*HOOKS, *SWITCHES])
def test_a_hook_or_a_switch_of_torch_is_refused_by_name_until_it_is_off(
    name: str, guarded: Guarded
) -> None:
    change, match = (HOOKS | SWITCHES)[name]
    with change(guarded):
        kinds = {change.kind for change in refused(guarded, match)}
    assert kinds == {ChangeKind.HOOK if name in HOOKS else ChangeKind.SETTING}
    guarded.step(guarded.batch())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_removed_hooks_are_refused_by_name() -> None:
    guarded = start(num_calls=0)
    with ExitStack() as hooks:
        handles = [hooks.enter_context(register(guarded)) for register, _ in HOOKS.values()]
        for _ in range(5):
            guarded.step(guarded.batch())
        seen: set[str] = set()
        for (_, match), handle in zip(HOOKS.values(), handles, strict=True):
            handle.remove()
            changes = refused(guarded, "was registered .* now removed")
            (new,) = {str(change) for change in changes} - seen
            assert re.search(match.partition(" was absent")[0], new)
            assert {change.kind for change in changes} == {ChangeKind.HOOK}
            seen.add(new)


def test_a_second_step_over_the_same_model_is_no_added_hook() -> None:
    guarded = start()
    with graphfsdp.capture(guarded.model, guarded.optim) as second:
        for _ in range(5):
            second(guarded.batch())
            guarded.step(guarded.batch())
        assert second.report().num_calls["replay"] == 1
    guarded.step(guarded.batch())
    with guarded.model.scale.register_hook(a_hook):
        refused(guarded, "gradient hook 'a_hook' .* of parameter 'scale'")


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
