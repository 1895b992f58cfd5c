"""FusedAdam's state: saved, loaded in place, of other Adams; clipping; steps that are left out.

Any optimizer leaves out what is not finite: test_optimizer_replays.py.
"""

import copy
import io
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphfsdp
from adam_helpers import (
    assert_equal,
    by_tensor_code,
    copies_of,
    copy_weights,
    flatten,
    grad_of,
    load_in_place,
    make_muon,
    make_params,
    make_twins,
    params_of,
    set_grads,
    state_addresses,
    take_steps,
)
from counting_net import mean_square
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam, Muon
from helpers import NUM_STEPS, make_optimizer, no_host_sync, same_bits


@given(
    max_norm=st.sampled_from([1e-3, 0.5, 1e6]),
    size=st.sampled_from([1e-12, 1.0, 1e12]),
    flat=st.booleans(),
    scale=st.sampled_from([None, 1024.0]),
)
def test_clipping_is_that_of_torch(
    max_norm: float, size: float, flat: bool, scale: float | None
) -> None:
    """Of gradients that were scaled, after they are unscaled."""
    params, twins = make_twins()
    set_grads(params, twins)
    for param in (*params, *twins):
        grad_of(param).mul_(size)
    if flat:
        flatten(params)
    ours = FusedAdam(params, max_grad_norm=max_norm, bias_correction=False)
    theirs = FusedAdam(twins, bias_correction=False)
    if scale is not None:
        for param in params:
            grad_of(param).mul_(scale)
    ours.step(grad_scale=None if scale is None else torch.tensor(1 / scale))
    expected = nn.utils.clip_grad_norm_(twins, max_norm)
    theirs.step()
    torch.testing.assert_close(ours.control.grad_norm, expected, rtol=1e-6, atol=0)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(
            ours.state[param]["exp_avg"], theirs.state[twin]["exp_avg"], rtol=1e-5, atol=1e-30
        )


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *itertools.product([FusedAdam, Muon], ["a flag", "a flag and a scale"]),
        (FusedAdam, "its own norm"),
    ],
)
def test_no_step_that_may_be_skipped_reads_the_host(
    device: torch.device, make: Any, how: str
) -> None:
    """Such a read would be a wait on CUDA, and an error in a capture."""
    settings: dict[str, Any] = {}
    if how == "its own norm":
        settings = {"skip_nonfinite": True, "max_grad_norm": 1.0}
    params = make_params([(8, 4), (3, 5)], device=device)
    optimizer = make(params, **settings)
    given: dict[str, Any] = {}
    if how.startswith("a flag"):
        given["found_inf"] = torch.zeros((), device=device)
    if how == "a flag and a scale":
        given["grad_scale"] = torch.tensor(0.5, device=device)
    set_grads(params)
    # What a GPU runs: the operation of a CPU may read its own memory.
    with by_tensor_code() if device.type == "cpu" else nullcontext():
        optimizer.step(**given)
        before = copies_of(params)
        with no_host_sync(device):
            optimizer.step(**given)
    assert not torch.equal(before[0], params[0])


def test_looking_at_the_count_waits_for_nothing(device: torch.device) -> None:
    model = nn.Linear(5, 1).to(device)
    optimizer = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optimizer, loss_fn=mean_square, skip_nonfinite=True) as step:
        step(torch.ones(2, 5, device=device))
        with no_host_sync(device):
            first = step.skipped_steps
        bad = torch.full((2, 5), torch.nan, device=device)
        step(bad)
        assert first is not None
        assert first.item() == 0  # a tensor of its own


@pytest.mark.parametrize("name", ["adamw", "fused_adam"])
def test_skipped_steps_are_in_checkpoints_of_any_optimizer(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    """Loaded before a capture, and into a live graph."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(5, 1).to(device)
        return model, make_optimizer(name, model.parameters(), device)

    good, bad = torch.ones(2, 5, device=device), torch.full((2, 5), torch.nan, device=device)
    saved, loading = make(), make()
    with graphfsdp.capture(*saved, loss_fn=mean_square, skip_nonfinite=True) as step:
        for x in (good, bad, good, good, bad):
            step(x)
        graphfsdp.save(tmp_path, *saved, step=2)
        step(bad)
        graphfsdp.save(tmp_path, *saved, step=3)
    graphfsdp.load(tmp_path, *loading, step=2)
    with graphfsdp.capture(*loading, loss_fn=mean_square, skip_nonfinite=True) as step:
        for index in range(5):
            step(bad if index in (1, 4) else good)
        assert step.skipped_steps is not None
        assert step.skipped_steps.item() == 4
        graphfsdp.load(tmp_path, *loading)
        step(bad)
        assert step.skipped_steps.item() == 4
        graphfsdp.load(tmp_path, *loading, step=2)
        assert step.skipped_steps.item() == 2


@pytest.mark.parametrize("settings", [{}, {"nesterov": True}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("num_bad", [1, 4])
def test_first_steps_that_are_left_out_leave_no_momentum_behind(
    device: torch.device, settings: dict[str, Any], num_bad: int
) -> None:
    """Torch's fused SGD takes what nothing has written; four: warm-ups and capture alike."""

    def train(*, captured: bool) -> list[nn.Parameter]:
        torch.manual_seed(0)
        model = nn.Linear(5, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, fused=True, **settings)
        step = None
        if captured:
            step = graphfsdp.capture(model, optimizer, loss_fn=mean_square, skip_nonfinite=True)
        found = []
        for index in range(NUM_STEPS):
            x = torch.full((2, 5), 1.0 + index, device=device)
            if index < num_bad or index == num_bad + 3:
                x.fill_(torch.inf)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + index)
            if step is not None:
                step(x)
            else:
                optimizer.zero_grad()
                mean_square(model, x).backward()
                if all(grad_of(param).isfinite().all() for param in model.parameters()):
                    optimizer.step()
            found += copies_of(list(model.parameters()))
        if step is not None:
            step.close()
        return found

    torch.use_deterministic_algorithms(mode=True)  # fills what nothing has written with NaN
    try:
        assert_equal(train(captured=True), train(captured=False))
    finally:
        torch.use_deterministic_algorithms(mode=False)


Change = Callable[..., None]  # of a state dict, parameters beside it, and its optimizer
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES: list[tuple[int, ...]] = [(20, 100), (100,), (3, 16, 5, 5), (0, 40), (), (6, 3)]


def make_adam(params: list[nn.Parameter], lr: float = 0.1, **settings: Any) -> FusedAdam:
    return FusedAdam(params, lr=lr, weight_decay=0.1, master_weights=True, **settings)


make_narrow = partial(make_adam, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (make_adam, FP32),
        (make_adam, BF16),
        (make_adam, torch.float16),
        (make_narrow, FP32),
        (make_narrow, BF16),
        (make_muon, FP32),
    ],
)
def test_a_state_loads_in_place_or_into_a_fresh_optimizer_and_goes_on(
    device: torch.device, make: Callable[..., Any], dtype: torch.dtype
) -> None:
    params = make_params(SHAPES, dtype, device)
    optimizer = make(params, lr=0.1)
    take_steps(3, optimizer)
    optimizer.step(found_inf=torch.ones((), device=device))
    fresh, existing = (make(copies_of(params), lr=0.3) for _ in range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    load_in_place(optimizer, existing)
    for num_steps in (0, 3):
        take_steps(num_steps, optimizer, fresh, existing)
        for other in (fresh, existing):
            assert other.param_groups[0]["lr"] == 0.1
            assert other.control.skipped_steps.item() == 1
            assert_equal(params_of(optimizer), params_of(other))
            for param, twin in zip(params_of(optimizer), params_of(other), strict=True):
                state, loaded = optimizer.state[param], other.state[twin]
                assert state.keys() == loaded.keys()
                assert all(map(same_bits, state.values(), loaded.values()))


@pytest.mark.parametrize(
    "settings",
    [
        {"fused": False},
        {"foreach": True},
        {"fused": True},
        {"fused": True, "capturable": True},
        {"fused": True, "lr": torch.tensor(0.05)},
        {"fused": True, "amsgrad": True, "maximize": True},
        {"fused": False, "amsgrad": True, "maximize": True},
    ],
    ids=["plain", "foreach", "fused", "capturable", "tensor_lr", "amsgrad", "amsgrad plain"],
)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_states_go_both_ways_between_torch_and_ours(make: Any, settings: dict[str, Any]) -> None:
    twins = make_params()
    numbers: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1, **settings}
    theirs = make(twins, **numbers)
    theirs._warned_capturable_if_run_uncaptured = True
    take_steps(3, theirs)
    params = copies_of(twins)
    rule = {key: settings.get(key, False) for key in ("amsgrad", "maximize")}
    adam_w_mode = make is torch.optim.AdamW
    ours = FusedAdam(params, 0.3, (0.5, 0.5), 1e-3, 0.7, adam_w_mode=adam_w_mode, **rule)
    ours.control.skipped_steps.fill_(3)
    ours.load_state_dict(theirs.state_dict())
    assert ours.control.skipped_steps.item() == 3  # of which theirs knows nothing
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == numbers["lr"]
    assert "fused" not in ours.param_groups[0]
    take_steps(3, ours, theirs)
    torch.testing.assert_close(params, twins, rtol=1e-6, atol=1e-6)
    back = copies_of(params)
    third = make(back, lr=0.3)
    third.load_state_dict(copy.deepcopy(ours.state_dict()))
    third.param_groups[0].update(rule)  # which is none of a group's numbers here
    take_steps(3, ours, theirs, third)
    torch.testing.assert_close(params, twins, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(back, twins, rtol=1e-6, atol=1e-6)


def test_loading_the_state_before_the_first_step_starts_anew_in_place() -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    fresh = copy.deepcopy(optimizer.state_dict())
    take_steps(1, optimizer)
    addresses = state_addresses(optimizer)
    optimizer.load_state_dict(fresh)
    assert state_addresses(optimizer) == addresses
    assert all(not t.any() for state in optimizer.state.values() for t in state.values())


def _group(**settings: Any) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved["param_groups"][0].update(settings)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda saved: saved["state"][0].update(exp_avg=torch.zeros(2)),
            r"'exp_avg' of parameter 0 of group 0 .*\(2,\), expected \(20, 10\)",
        ),
        (
            lambda saved: saved.update(param_groups=[]),
            r"groups of \[\] parameters, this optimizer of \[5\]",
        ),
        (
            lambda saved: saved["param_groups"][0]["params"].pop(),
            r"groups of \[4\] parameters, this optimizer of \[5\]",
        ),
        (lambda saved: saved["state"][0].pop("exp_avg_sq"), "no 'exp_avg_sq'"),
        (
            lambda saved: saved["state"][0].pop("max_exp_avg_sq"),
            "parameter 0 of group 0 has no 'max_exp_avg_sq'",
        ),
        (
            lambda saved: saved["state"][0].update(master_param=torch.zeros(20, 10).short()),
            r"'master_param' of parameter 0 .* torch\.int16",
        ),
        (_group(amsgrad=False), "amsgrad=False.*construct FusedAdam with amsgrad=False"),
        (_group(maximize=True), "maximize=True.*construct FusedAdam with maximize=True"),
        (_group(bias_correction=False), "construct FusedAdam with bias_correction=False"),
        (_group(decoupled_weight_decay=False, weight_decay=0.1), "adam_w_mode=False"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    damage: Callable[[dict[str, Any]], None], words: str
) -> None:
    params = make_params()
    optimizer = FusedAdam(params, amsgrad=True)
    take_steps(1, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    for entries in broken["state"].values():
        entries["step"] += 5
    damage(broken)
    with pytest.raises(ConfigError, match=words):
        optimizer.load_state_dict(broken)
    for index, entries in optimizer.state_dict()["state"].items():
        for key, tensor in entries.items():
            assert torch.equal(tensor, before["state"][index][key])


def test_load_hooks_run() -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    seen: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after"]


def counts_in_groups(step: Any) -> Change:
    """As the FusedAdam of Transformer Engine or apex saves it."""

    def change(saved: dict[str, Any], *_: object) -> None:
        for entries in saved["state"].values():
            del entries["step"]
        for group in saved["param_groups"]:
            group.update(step=step, bias_correction=True)

    return change


def with_old_main_weights(saved: dict[str, Any], params: list[nn.Parameter], *_: object) -> None:
    """Transformer Engine keeps some beside float32 parameters; its kernel never updates them."""
    counts_in_groups(torch.tensor([3], dtype=torch.int32))(saved)
    for param, entries in zip(params, saved["state"].values(), strict=True):
        entries["master_param"] = torch.zeros_like(param)


def without_main_weights(saved: dict[str, Any], _: object, source: FusedAdam) -> None:
    """They begin as the parameters."""
    for (param, state), entries in zip(source.state.items(), saved["state"].values(), strict=True):
        copy_weights([param], [state["master_param"]])
        del entries["master_param"]


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        *((dtype, counts_in_groups(3)) for dtype in (FP32, BF16)),
        *((dtype, counts_in_groups(torch.tensor([3]).int())) for dtype in (FP32, BF16)),
        (FP32, with_old_main_weights),
        (BF16, without_main_weights),
    ],
)
def test_what_others_save_stands_for_the_same(dtype: torch.dtype, change: Change) -> None:
    params = make_params(dtype=dtype)
    source = make_adam(params)
    take_steps(3, source)
    twins, saved = copies_of(params), copy.deepcopy(source.state_dict())
    change(saved, twins, source)
    target = FusedAdam(twins, master_weights=True)
    target.load_state_dict(saved)
    assert "bias_correction" not in target.param_groups[0]
    for num_steps in (0, 2):
        take_steps(num_steps, source, target)
        for param, twin in zip(params, twins, strict=True):
            state, loaded = source.state[param], target.state[twin]
            assert state.keys() == loaded.keys()
            assert all(torch.equal(state[key], loaded[key]) for key in state)
            assert num_steps == 0 or torch.equal(param, twin)


def test_the_state_of_a_group_that_has_not_stepped_is_empty() -> None:
    ours = FusedAdam(make_params())
    state = ours.state_dict()
    counts_in_groups(0)(state)
    del state["param_groups"][0]["step"]
    ours.load_state_dict(state)
    assert not ours.state


def test_constructor_calls_for_transformer_engine_work_as_they_are() -> None:
    settings: dict[str, Any] = {
        "bias_correction": True,
        "adam_w_mode": True,
        "capturable": True,
        "master_weights": True,
        "master_weight_dtype": FP32,
        "exp_avg_dtype": BF16,
        "exp_avg_sq_dtype": BF16,
        "use_decoupled_grad": True,
    }
    optimizer = FusedAdam(make_params(), 1e-3, (0.9, 0.95), 1e-8, 0.1, False, **settings)
    assert "amsgrad" not in optimizer.param_groups[0]
    assert FusedAdam(make_params(), 1e-3, (0.9, 0.95), 1e-8, 0.1, True).settings.amsgrad
