"""State of FusedAdam: saved, loaded in place, copied, replaced; states of other Adams."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adam_helpers import (
    assert_equal,
    copies_of,
    copy_weights,
    load_in_place,
    make_params,
    make_twins,
    params_of,
    set_grads,
    state_addresses,
    take_steps,
)
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from helpers import same_bits

FP32, BF16 = torch.float32, torch.bfloat16
NARROW = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
# The dtype of the parameters, and settings of FusedAdam beside main weights.
ADAMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FP32, {}),
    "bfloat16": (BF16, {}),
    "float16": (torch.float16, {}),
    "narrow float32": (FP32, NARROW),
    "narrow bfloat16": (BF16, NARROW),
}
SHAPES: list[tuple[int, ...]] = [(20, 100), (100,), (3, 16, 5, 5), (0, 40), (), (6, 3)]


def make_optimizer(kind: str, params: list[nn.Parameter], lr: float = 0.1) -> FusedAdam:
    return FusedAdam(params, lr=lr, weight_decay=0.1, master_weights=True, **ADAMS[kind][1])


@pytest.mark.parametrize("kind", ADAMS)
def test_a_state_loads_in_place_or_into_a_fresh_optimizer_and_goes_on(
    device: torch.device, kind: str
) -> None:
    dtype, settings = ADAMS[kind]
    params = make_params(SHAPES, dtype, device)
    optimizer = make_optimizer(kind, params)
    take_steps(3, optimizer)
    optimizer.step(found_inf=torch.ones((), device=device))
    fresh, existing = (make_optimizer(kind, copies_of(params), lr=0.3) for _ in range(2))
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
            assert_equal(params, params_of(other))
            for state, loaded in zip(optimizer.state.values(), other.state.values(), strict=True):
                assert state.keys() == loaded.keys()
                assert all(map(same_bits, state.values(), loaded.values()))
                if not settings:
                    assert {tensor.dtype for tensor in loaded.values()} == {FP32}


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
    ours.load_state_dict(theirs.state_dict())
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


def test_loading_a_state_without_main_weights_takes_them_from_the_parameters() -> None:
    params = make_params(dtype=BF16)
    ours = FusedAdam(params, master_weights=True)
    take_steps(1, ours)
    state = copy.deepcopy(ours.state_dict())
    for entries in state["state"].values():
        del entries["master_param"]
    with torch.no_grad():
        for param in params:
            param.fill_(0.5)
    ours.load_state_dict(state)
    for param in params:
        assert torch.equal(ours.state[param]["master_param"], param.float())


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
        (_group(amsgrad=True), "amsgrad=True.*construct FusedAdam with amsgrad=True"),
        (_group(maximize=True), "maximize=True.*construct FusedAdam with maximize=True"),
        (_group(bias_correction=False), "construct FusedAdam with bias_correction=False"),
        (_group(decoupled_weight_decay=False, weight_decay=0.1), "adam_w_mode=False"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    damage: Callable[[dict[str, Any]], None], words: str
) -> None:
    params = make_params()
    optimizer = FusedAdam(params)
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


def test_a_loaded_lr_goes_into_the_lr_tensor() -> None:
    params = make_params()
    lr = torch.tensor(0.1)
    optimizer = FusedAdam(params, lr=lr)
    state = FusedAdam(params, lr=0.25).state_dict()
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25


def test_state_that_was_taken_away_starts_anew() -> None:
    params, twins = make_twins()
    optimizer = FusedAdam(params)
    set_grads(params, twins)
    optimizer.step()
    copy_weights(twins, params)
    optimizer.state.clear()
    optimizer.step()
    FusedAdam(twins).step()
    assert_equal(params, twins)
    assert {state["step"].item() for state in optimizer.state.values()} == {1}


def test_a_state_tensor_that_was_replaced_is_used() -> None:
    params, twins = make_twins()
    ours, theirs = FusedAdam(params), torch.optim.AdamW(twins, weight_decay=0, fused=True)
    for _ in range(2):
        take_steps(1, ours, theirs)
        for param, twin in zip(params, twins, strict=True):
            moment = torch.randn_like(param)
            ours.state[param]["exp_avg"] = moment
            theirs.state[twin]["exp_avg"] = moment.clone()
    assert_equal(params, twins)


def te_state_of(optimizer: FusedAdam, step: Any) -> dict[str, Any]:
    """Return a state as the FusedAdam of Transformer Engine or apex saves it: step per group."""
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        del entries["step"]
    for group in state["param_groups"]:
        group.update(step=step, bias_correction=True)
    return state


@pytest.mark.parametrize("step", [3, torch.tensor([3], dtype=torch.int32)], ids=["apex", "te"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_step_count_of_the_group_becomes_that_of_each_parameter(
    step: Any, dtype: torch.dtype
) -> None:
    params = make_params(dtype=dtype)
    theirs = FusedAdam(params, lr=0.1, weight_decay=0.1, master_weights=True)
    take_steps(3, theirs)
    twins = copies_of(params)
    ours = FusedAdam(twins, master_weights=True)
    ours.load_state_dict(te_state_of(theirs, step))
    assert "bias_correction" not in ours.param_groups[0]
    take_steps(2, theirs, ours)
    assert_equal(params, twins)
    assert {state["step"].item() for state in ours.state.values()} == {5}


def test_the_state_of_a_group_that_has_not_stepped_is_empty() -> None:
    params = make_params()
    ours = FusedAdam(params)
    state = te_state_of(ours, 0)
    del state["param_groups"][0]["step"]
    ours.load_state_dict(state)
    assert not ours.state


def test_a_main_weight_that_was_saved_in_two_halves_loads_exactly() -> None:
    """As Transformer Engine and graphfsdp 0.1 save it with store_param_remainders."""
    params = make_params(dtype=BF16)
    source = FusedAdam(params, lr=1e-3, master_weights=True)
    take_steps(5, source)
    twins, saved = copies_of(params), copy.deepcopy(source.state_dict())
    for twin, entries in zip(twins, saved["state"].values(), strict=True):
        bits = entries["master_param"].view(torch.int32)
        low = bits.to(torch.int16)  # signed: the upper half is the float32 rounded to the nearest
        twin.data.view(torch.int16).copy_((bits - low) >> 16)
        entries["master_param"] = low
    target = FusedAdam(twins, master_weights=True)
    target.load_state_dict(saved)
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(source.state[param]["master_param"], target.state[twin]["master_param"])


def test_an_amsgrad_state_without_its_largest_moments_is_refused() -> None:
    params = make_params()
    plain = FusedAdam(params)
    take_steps(1, plain)
    with pytest.raises(ConfigError, match="parameter 0 of group 0 has no 'max_exp_avg_sq'"):
        FusedAdam(params, amsgrad=True).load_state_dict(plain.state_dict())


def test_a_main_weight_that_transformer_engine_keeps_beside_float32_parameters_is_not_read() -> (
    None
):
    """Its capturable kernel never updates that one, so it is old."""
    params = make_params()
    theirs = FusedAdam(params, lr=0.1, master_weights=True)
    take_steps(1, theirs)
    state = te_state_of(theirs, torch.tensor([1], dtype=torch.int32))
    for param, entries in zip(params, state["state"].values(), strict=True):
        entries["master_param"] = torch.zeros_like(param)
    twins = copies_of(params)
    ours = FusedAdam(twins, master_weights=True)
    ours.load_state_dict(state)
    assert_equal(params, twins)
    take_steps(1, theirs, ours)
    assert_equal(params, twins)


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
