"""Changed optimizer state and groups, hooks and torch's switches are refused by name."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import graphfsdp
from graphfsdp import ChangeKind
from guard_net import Guarded, refused, start
from helpers import assert_same_state, same_bits

Undo = Callable[[], Any]
Apply = Callable[[Guarded], Undo]


def first_state(guarded: Guarded) -> dict[str, Any]:
    state: dict[str, Any] = guarded.optim.state[guarded.model.get_parameter("body.layers.0.weight")]
    return state


def loaded(guarded: Guarded) -> None:
    state = guarded.optim.state_dict()
    copies = {
        index: {key: value.clone() for key, value in entries.items()}
        for index, entries in state["state"].items()
    }
    groups = [
        group | {"lr": guarded.optim.param_groups[0]["lr"]} for group in state["param_groups"]
    ]
    guarded.optim.load_state_dict({"state": copies, "param_groups": groups})


def puts(get: Callable[[Guarded], Any], key: Any, make: Callable[[Any], Any]) -> Apply:
    """Return the replacement of an item by what is made of it."""

    def apply(guarded: Guarded) -> Undo:
        holder = get(guarded)
        old = holder[key]
        holder[key] = make(old)
        return lambda: holder.__setitem__(key, old)

    return apply


def entry_moved(guarded: Guarded) -> Undo:
    entry = first_state(guarded)["exp_avg_sq"]
    old = entry.data
    entry.data = old.clone()
    return lambda: setattr(entry, "data", old)


def entry_added(guarded: Guarded) -> Undo:
    first_state(guarded)["extra"] = torch.zeros(2)
    return lambda: first_state(guarded).pop("extra")


def cleared(guarded: Guarded) -> Undo:
    old = dict(guarded.optim.state)
    guarded.optim.state.clear()
    return lambda: guarded.optim.state.update(old)


def parameter_dropped(guarded: Guarded) -> Undo:
    params: list[Tensor] = guarded.optim.param_groups[0]["params"]
    last = params.pop()
    return lambda: params.append(last)


def group_added(guarded: Guarded) -> Undo:
    guarded.optim.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return guarded.optim.param_groups.pop


def step_replaced(guarded: Guarded) -> Undo:
    guarded.optim.step = lambda *args: None  # type: ignore[method-assign,assignment]
    return lambda: vars(guarded.optim).pop("step")


def step_of_the_class_replaced(guarded: Guarded) -> Undo:
    kind: Any = type(guarded.optim)
    old, kind.step = kind.step, lambda self: None
    return lambda: setattr(kind, "step", old)


@pytest.fixture(scope="module")
def shared() -> Callable[[str], Guarded]:
    """Return the step of an optimizer, of which all changes are taken back."""
    return functools.cache(start)


def assert_refused_until_undone(
    guarded: Guarded, apply: Apply, match: str, kind: ChangeKind
) -> None:
    undo = apply(guarded)
    try:
        assert {change.kind for change in refused(guarded, match)} == {kind}
    finally:
        undo()
    guarded.step(guarded.batch())


WEIGHT = r"'body\.layers\.0\.weight'"
STATE_CHANGES: dict[str, tuple[Apply, str, ChangeKind]] = {
    "entry_replaced": (
        puts(first_state, "exp_avg", Tensor.clone),
        f"'exp_avg' of {WEIGHT}",
        ChangeKind.OPTIMIZER_STATE,
    ),
    "count_replaced": (
        puts(first_state, "step", Tensor.clone),
        f"'step' of {WEIGHT}",
        ChangeKind.OPTIMIZER_STATE,
    ),
    "entry_moved": (
        entry_moved,
        f"'exp_avg_sq' of {WEIGHT} was at address 0x.* in other memory",
        ChangeKind.ADDRESS,
    ),
    "entry_added": (
        entry_added,
        f"'extra' of {WEIGHT} was absent .* now there",
        ChangeKind.OPTIMIZER_STATE,
    ),
    "cleared": (cleared, f"'exp_avg' of {WEIGHT} was there .* gone", ChangeKind.OPTIMIZER_STATE),
    "parameter_dropped": (
        parameter_dropped,
        r"group 0 of \w+ was of 7 parameters \(with body\.norm\.bias\) .* now of 6",
        ChangeKind.GROUPS,
    ),
    "parameter_exchanged": (
        puts(
            lambda guarded: guarded.optim.param_groups[0]["params"],
            -1,
            lambda old: nn.Parameter(old.detach().clone()),
        ),
        r"with body\.norm\.bias\) .* \(with an unknown one",
        ChangeKind.GROUPS,
    ),
    "group_added": (group_added, r"was of 1 groups .* now of 2", ChangeKind.GROUPS),
    "step": (step_replaced, r"\w+\.step was one function", ChangeKind.ATTRIBUTE),
    "step_of_the_class": (
        step_of_the_class_replaced,
        r"\w+\.step was one function",
        ChangeKind.ATTRIBUTE,
    ),
}


@pytest.mark.parametrize("optimizer", ["fused_adam", "adamw"])
@pytest.mark.parametrize("name", STATE_CHANGES)
def test_a_change_of_the_optimizer_is_refused_by_name(
    name: str, optimizer: str, shared: Callable[[str], Guarded]
) -> None:
    apply, match, kind = STATE_CHANGES[name]
    assert_refused_until_undone(shared(optimizer), apply, match, kind)


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
    param = guarded.model.get_parameter("body.layers.0.weight")
    grad = param.grad
    assert grad is not None
    grad.data = torch.full_like(grad, 7.0)
    x = guarded.batch()
    guarded.train(x)
    twin.train(x)
    assert grad.eq(7.0).all()
    expected = twin.model.get_parameter("body.layers.0.weight").grad
    assert param.grad is not None
    assert expected is not None
    assert torch.equal(param.grad, expected)


def a_hook(*args: Any) -> None:
    """Do nothing."""


HOOKS: dict[str, tuple[Callable[[Guarded], Any], str]] = {
    "forward": (
        lambda g: g.model.body.norm.register_forward_hook(a_hook),
        r"forward hook 'a_hook' \(.*test_guards_optimizer\.py:\d+\) of module 'body\.norm'",
    ),
    "forward_pre": (
        lambda g: g.model.register_forward_pre_hook(a_hook),
        "forward pre-hook 'a_hook' .* of the model was absent .* now registered",
    ),
    "backward": (
        lambda g: g.model.body.norm.register_full_backward_hook(a_hook),
        "backward hook 'a_hook' .* of module 'body.norm'",
    ),
    "backward_pre": (
        lambda g: g.model.body.norm.register_full_backward_pre_hook(a_hook),
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


@pytest.mark.parametrize("name", HOOKS)
def test_an_added_hook_is_refused_by_name(name: str, shared: Callable[[str], Guarded]) -> None:
    register, match = HOOKS[name]
    guarded = shared("fused_adam")
    assert_refused_until_undone(
        guarded, lambda guarded: register(guarded).remove, match, ChangeKind.HOOK
    )


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_removed_hooks_are_refused_by_name() -> None:
    guarded = start(num_calls=0)
    handles = [register(guarded) for register, _ in HOOKS.values()]
    try:
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
    finally:
        for handle in handles:
            handle.remove()


def test_a_second_step_over_the_same_model_is_no_added_hook() -> None:
    guarded = start()
    with graphfsdp.capture(guarded.model, guarded.optim) as second:
        for _ in range(5):
            second(guarded.batch())
            guarded.step(guarded.batch())
        assert second.report().num_calls["replay"] == 1
    guarded.step(guarded.batch())
    handle = guarded.model.scale.register_hook(a_hook)
    refused(guarded, "gradient hook 'a_hook' .* of parameter 'scale'")
    handle.remove()


def switched(set_: Callable[[Any], Any], value: Any, back: Any) -> Apply:
    def apply(guarded: Guarded) -> Undo:
        set_(value)
        return lambda: set_(back)

    return apply


SWITCHES: dict[str, tuple[Apply, str]] = {
    "default_dtype": (
        switched(torch.set_default_dtype, torch.float64, torch.float32),
        r"the default dtype was torch\.float32 .* now torch\.float64",
    ),
    "deterministic": (
        switched(torch.use_deterministic_algorithms, True, False),
        r"torch\.use_deterministic_algorithms was off .* now on",
    ),
    "matmul_precision": (
        switched(torch.set_float32_matmul_precision, "medium", "highest"),
        "the float32 precision of mkldnn matmul was ieee .* now bf16",
    ),
    "math_attention": (
        switched(torch.backends.cuda.enable_math_sdp, False, True),
        "math attention was on .* now off",
    ),
    "flash_attention": (
        switched(torch.backends.cuda.enable_flash_sdp, False, True),
        "flash attention was on",
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_of_torch_is_refused_by_name(name: str, shared: Callable[[str], Guarded]) -> None:
    apply, match = SWITCHES[name]
    assert_refused_until_undone(shared("fused_adam"), apply, match, ChangeKind.SETTING)


@pytest.mark.parametrize("captured_inside", [False, True])
def test_another_autocast_state_is_refused_by_name(captured_inside: bool) -> None:
    with torch.autocast("cpu", enabled=captured_inside):
        guarded = start()
    with torch.autocast("cpu", enabled=not captured_inside):
        words = ("on", "off") if captured_inside else ("off", "on")
        changes = refused(guarded, f"autocast on cpu was {words[0]} .* now {words[1]}")
    assert {change.kind for change in changes} == {ChangeKind.SETTING}
    with torch.autocast("cpu", enabled=captured_inside):
        guarded.step(guarded.batch())


def test_another_autocast_dtype_is_refused_by_name() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        guarded = start()
    with torch.autocast("cpu", torch.float16):
        refused(guarded, r"autocast's dtype on cpu was torch\.bfloat16 .* now torch\.float16")
