"""State of FusedAdam: saved, loaded in place, copied, replaced."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adam_helpers import (
    LOW_PRECISION,
    assert_equal,
    copies_of,
    make_params,
    set_grads,
)
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam


def _addresses(optimizer: FusedAdam) -> list[int]:
    return [t.data_ptr() for state in optimizer.state.values() for t in state.values()]


@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION])
def test_state_dict_loads_in_place_and_training_goes_on_as_if_nothing_happened(
    device: torch.device, dtype: torch.dtype
) -> None:
    params = make_params(dtype=dtype, device=device)
    optimizer = FusedAdam(params, lr=0.1, weight_decay=0.1, master_weights=True)
    for _ in range(3):
        set_grads(params)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copies_of(params)
    grads = [[torch.randn_like(param) for param in params] for _ in range(3)]

    def train() -> list[nn.Parameter]:
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad.clone()
            optimizer.step()
        return copies_of(params)

    expected = train()
    addresses = _addresses(optimizer)
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert _addresses(optimizer) == addresses
    for state in optimizer.state.values():
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert_equal(train(), expected)


def test_state_dict_goes_through_torch_save_into_a_fresh_optimizer() -> None:
    params = make_params(dtype=torch.bfloat16)
    optimizer = FusedAdam(params, lr=0.1, master_weights=True)
    set_grads(params)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twins = copies_of(params)
    fresh = FusedAdam(twins, lr=0.3, master_weights=True)
    fresh.load_state_dict(torch.load(file))
    for _ in range(2):
        set_grads(params, twins)
        optimizer.step()
        fresh.step()
    assert_equal(params, twins)
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(
            optimizer.state[param]["master_param"], fresh.state[twin]["master_param"]
        )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_state_of_torch_loads_and_goes_on(adam_w_mode: bool, fused: bool) -> None:
    params = make_params()
    twins = copies_of(params)
    make = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    theirs = make(twins, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1, fused=fused)
    for _ in range(3):
        set_grads(params, twins)
        theirs.step()
    with torch.no_grad():
        for param, twin in zip(params, twins, strict=True):
            param.copy_(twin)
    ours = FusedAdam(params, adam_w_mode=adam_w_mode)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.05
    assert "fused" not in ours.param_groups[0]
    for _ in range(3):
        set_grads(params, twins)
        ours.step()
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-6)


def test_loading_a_state_without_main_weights_takes_them_from_the_parameters() -> None:
    params = make_params(dtype=torch.bfloat16)
    ours = FusedAdam(params, master_weights=True)
    set_grads(params)
    ours.step()
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
    set_grads(params)
    optimizer.step()
    addresses = _addresses(optimizer)
    optimizer.load_state_dict(fresh)
    assert _addresses(optimizer) == addresses
    assert all(not t.any() for state in optimizer.state.values() for t in state.values())


def test_loaded_step_counts_may_differ_between_parameters() -> None:
    params = make_params([(3,), (4,)])
    twins = copies_of(params)
    theirs = torch.optim.AdamW(twins, weight_decay=0, fused=True)
    twins[0].grad = torch.randn(3)
    theirs.step()
    set_grads(params, twins)
    theirs.step()
    with torch.no_grad():
        for param, twin in zip(params, twins, strict=True):
            param.copy_(twin)
    ours = FusedAdam(params)
    ours.load_state_dict(theirs.state_dict())
    set_grads(params, twins)
    ours.step()
    theirs.step()
    assert_equal(params, twins)
    assert [ours.state[param]["step"].item() for param in params] == [3, 2]


def _break_shape(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = torch.zeros(2)


def _drop_group(state: dict[str, Any]) -> None:
    state["param_groups"] = []


def _drop_param(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


def _drop_moment(state: dict[str, Any]) -> None:
    del state["state"][0]["exp_avg_sq"]


def _set_amsgrad(state: dict[str, Any]) -> None:
    state["param_groups"][0]["amsgrad"] = True


def _set_l2(state: dict[str, Any]) -> None:
    state["param_groups"][0].update(decoupled_weight_decay=False, weight_decay=0.1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_break_shape, r"'exp_avg' of parameter 0 of group 0 .*\(2,\), expected \(20, 10\)"),
        (_drop_group, "0 parameter groups"),
        (_drop_param, r"group 0 .* 4 parameters, here it has 5"),
        (_drop_moment, "no 'exp_avg_sq'"),
        (_set_amsgrad, "amsgrad=True"),
        (_set_l2, "adam_w_mode=False"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    damage: Callable[[dict[str, Any]], None], words: str
) -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    set_grads(params)
    optimizer.step()
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


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alike_and_apart(how: str) -> None:
    model = nn.Linear(5, 3).bfloat16()
    optimizer = FusedAdam(model.parameters(), lr=0.1, master_weights=True, weight_decay=0.1)
    set_grads(list(model.parameters()))
    optimizer.step()
    if how == "deepcopy":
        twin_model, twin = copy.deepcopy((model, optimizer))
    else:
        twin_model, twin = pickle.loads(pickle.dumps((model, optimizer)))
    assert twin.settings == optimizer.settings
    for _ in range(2):
        set_grads(list(model.parameters()), list(twin_model.parameters()))
        optimizer.step()
        twin.step()
    assert_equal(list(model.parameters()), list(twin_model.parameters()))
    before = copies_of(list(twin_model.parameters()))
    optimizer.step()
    assert_equal(list(twin_model.parameters()), before)


def test_state_that_was_taken_away_starts_anew() -> None:
    params = make_params()
    twins = copies_of(params)
    optimizer = FusedAdam(params)
    set_grads(params, twins)
    optimizer.step()
    with torch.no_grad():
        for param, twin in zip(params, twins, strict=True):
            param.copy_(twin)
    optimizer.state.clear()
    optimizer.step()
    FusedAdam(twins).step()
    assert_equal(params, twins)
    assert {state["step"].item() for state in optimizer.state.values()} == {1}


def test_a_state_tensor_that_was_replaced_is_used() -> None:
    params = make_params()
    twins = copies_of(params)
    ours, theirs = FusedAdam(params), torch.optim.AdamW(twins, weight_decay=0, fused=True)
    for _ in range(2):
        set_grads(params, twins)
        ours.step()
        theirs.step()
        for param, twin in zip(params, twins, strict=True):
            moment = torch.randn_like(param)
            ours.state[param]["exp_avg"] = moment
            theirs.state[twin]["exp_avg"] = moment.clone()
    assert_equal(params, twins)


def test_a_group_that_joins_late_trains() -> None:
    params = make_params()
    twins = copies_of(params)
    ours = FusedAdam(params[:2], lr=0.1)
    theirs = torch.optim.AdamW(twins[:2], lr=0.1, weight_decay=0, fused=True)
    for _ in range(2):
        set_grads(params, twins)
        ours.step()
        theirs.step()
    ours.add_param_group({"params": params[2:], "lr": 0.2})
    theirs.add_param_group({"params": twins[2:], "lr": 0.2})
    for _ in range(2):
        set_grads(params, twins)
        ours.step()
        theirs.step()
    assert_equal(params, twins)


def test_step_counts_are_float32_scalars_of_one_storage(device: torch.device) -> None:
    params = make_params(device=device)
    optimizer = FusedAdam(params)
    set_grads(params)
    optimizer.step()
    steps = [optimizer.state[param]["step"] for param in params]
    assert {(step.shape, step.dtype) for step in steps} == {(torch.Size([]), torch.float32)}
    assert len({step.untyped_storage().data_ptr() for step in steps}) == 1
