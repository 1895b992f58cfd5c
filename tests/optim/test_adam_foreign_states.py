"""States that other Adams saved, and main weights that were saved in another form."""

import copy
from typing import Any

import pytest
import torch

from adam_helpers import assert_equal, copies_of, make_params, set_grads
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused.storage import join_remainder


def te_state_of(optimizer: FusedAdam, step: Any) -> dict[str, Any]:
    """Return a state as the FusedAdam of Transformer Engine or apex saves it: step per group."""
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        del entries["step"]
    for group in state["param_groups"]:
        group.update(step=step, bias_correction=True)
    return state


@pytest.mark.parametrize("step", [3, torch.tensor([3], dtype=torch.int32)], ids=["apex", "te"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_count_of_the_group_becomes_that_of_each_parameter(
    step: Any, dtype: torch.dtype
) -> None:
    params = make_params(dtype=dtype)
    theirs = FusedAdam(params, lr=0.1, weight_decay=0.1, master_weights=True)
    for _ in range(3):
        set_grads(params)
        theirs.step()
    twins = copies_of(params)
    ours = FusedAdam(twins, master_weights=True)
    ours.load_state_dict(te_state_of(theirs, step))
    assert "bias_correction" not in ours.param_groups[0]
    for _ in range(2):
        set_grads(params, twins)
        theirs.step()
        ours.step()
    assert_equal(params, twins)
    assert {state["step"].item() for state in ours.state.values()} == {5}


def test_the_state_of_a_group_that_has_not_stepped_is_empty() -> None:
    params = make_params()
    ours = FusedAdam(params)
    state = te_state_of(ours, 0)
    del state["param_groups"][0]["step"]
    ours.load_state_dict(state)
    assert not ours.state


@pytest.mark.parametrize("saved_halves", [True, False])
@pytest.mark.parametrize("kept_halves", [True, False])
def test_main_weights_load_exactly_in_either_form(saved_halves: bool, kept_halves: bool) -> None:
    params = make_params(dtype=torch.bfloat16)
    source = FusedAdam(params, lr=1e-3, master_weights=True, store_param_remainders=saved_halves)
    for _ in range(5):
        set_grads(params)
        source.step()
    twins = copies_of(params)
    target = FusedAdam(twins, master_weights=True, store_param_remainders=kept_halves)
    target.load_state_dict(source.state_dict())

    def mains(optimizer: FusedAdam) -> list[torch.Tensor]:
        found = []
        for param, state in optimizer.state.items():
            main = state["master_param"]
            halves = main.dtype == torch.int16
            found.append(join_remainder(param.detach(), main) if halves else main)
        return found

    for left, right in zip(mains(source), mains(target), strict=True):
        assert torch.equal(left, right)
    for _ in range(3):
        set_grads(params, twins)
        source.step()
        target.step()
    for left, right in zip(mains(source), mains(target), strict=True):
        assert torch.equal(left, right)


def test_remainders_start_at_zero_where_no_main_weight_was_saved() -> None:
    params = make_params(dtype=torch.bfloat16)
    ours = FusedAdam(params, master_weights=True, store_param_remainders=True)
    for _ in range(2):
        set_grads(params)
        ours.step()
    state = copy.deepcopy(ours.state_dict())
    for entries in state["state"].values():
        del entries["master_param"]
    ours.load_state_dict(state)
    assert not any(entries["master_param"].any() for entries in ours.state.values())


@pytest.mark.parametrize("fused", [True, False])
def test_amsgrad_states_of_torch_load_and_go_on(fused: bool) -> None:
    params = make_params()
    twins = copies_of(params)
    theirs = torch.optim.AdamW(twins, lr=0.05, amsgrad=True, maximize=True, fused=fused)
    for _ in range(3):
        set_grads(twins)
        theirs.step()
    with torch.no_grad():
        for param, twin in zip(params, twins, strict=True):
            param.copy_(twin)
    ours = FusedAdam(params, amsgrad=True, maximize=True)
    ours.load_state_dict(theirs.state_dict())
    for _ in range(3):
        set_grads(params, twins)
        ours.step()
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "value"), [("bias_correction", False), ("maximize", True), ("amsgrad", True)]
)
def test_a_state_of_another_rule_is_refused(key: str, value: bool) -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    set_grads(params)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][key] = value
    with pytest.raises(ConfigError, match=f"{key}={value}.*construct FusedAdam with {key}={value}"):
        optimizer.load_state_dict(state)


def test_an_amsgrad_state_without_its_largest_moments_is_refused() -> None:
    params = make_params()
    plain = FusedAdam(params)
    set_grads(params)
    plain.step()
    with pytest.raises(ConfigError, match="parameter 0 of group 0 has no 'max_exp_avg_sq'"):
        FusedAdam(params, amsgrad=True).load_state_dict(plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_keeps_addresses_and_dtypes_of_narrow_states(dtype: torch.dtype) -> None:
    params = make_params(dtype=dtype)
    optimizer = FusedAdam(
        params,
        exp_avg_dtype=torch.bfloat16,
        exp_avg_sq_dtype=torch.bfloat16,
        master_weights=True,
        store_param_remainders=True,
    )
    set_grads(params)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    before = [
        (key, tensor.data_ptr(), tensor.dtype)
        for state in optimizer.state.values()
        for key, tensor in state.items()
    ]
    set_grads(params)
    optimizer.step()
    optimizer.load_state_dict(saved)
    after = [
        (key, tensor.data_ptr(), tensor.dtype)
        for state in optimizer.state.values()
        for key, tensor in state.items()
    ]
    assert after == before
    for index, entries in optimizer.state_dict()["state"].items():
        for key, tensor in entries.items():
            assert torch.equal(tensor, saved["state"][index][key]), key
            assert tensor.dtype == saved["state"][index][key].dtype


@pytest.mark.parametrize(
    "settings",
    [
        {"foreach": True},
        {"fused": True},
        {"fused": True, "capturable": True},
        {"fused": True, "lr": torch.tensor(0.05)},
    ],
    ids=["foreach", "fused", "capturable", "tensor_lr"],
)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_states_go_both_ways_between_torch_and_ours(make: Any, settings: dict[str, Any]) -> None:
    twins = make_params()
    theirs = make(twins, **{"lr": 0.05, "weight_decay": 0.1, **settings})
    theirs._warned_capturable_if_run_uncaptured = True
    set_grads(twins)
    theirs.step()
    params = copies_of(twins)
    ours = FusedAdam(params, 0.3, (0.5, 0.5), 1e-3, 0.7, adam_w_mode=make is torch.optim.AdamW)
    ours.load_state_dict(theirs.state_dict())
    for _ in range(3):
        set_grads(params, twins)
        ours.step()
        theirs.step()
    back = copies_of(params)
    third = make(back, lr=0.3)
    third.load_state_dict(copy.deepcopy(ours.state_dict()))
    for _ in range(3):
        set_grads(params, twins, back)
        for optimizer in (ours, theirs, third):
            optimizer.step()
    for param, twin, other in zip(params, twins, back, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other, twin, rtol=1e-6, atol=1e-6)


def test_a_main_weight_that_transformer_engine_keeps_beside_float32_parameters_is_not_read() -> (
    None
):
    """Its capturable kernel never updates that one, so it is old."""
    params = make_params()
    theirs = FusedAdam(params, lr=0.1, math="te", master_weights=True)
    set_grads(params)
    theirs.step()
    state = te_state_of(theirs, torch.tensor([1], dtype=torch.int32))
    for param, entries in zip(params, state["state"].values(), strict=True):
        entries["master_param"] = torch.zeros_like(param)
    twins = copies_of(params)
    ours = FusedAdam(twins, math="te", master_weights=True)
    ours.load_state_dict(state)
    assert_equal(params, twins)
    set_grads(params, twins)
    theirs.step()
    ours.step()
    assert_equal(params, twins)


def test_constructor_calls_for_transformer_engine_work_as_they_are() -> None:
    settings: dict[str, Any] = {
        "bias_correction": True,
        "adam_w_mode": True,
        "capturable": True,
        "master_weights": True,
        "master_weight_dtype": torch.float32,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
        "use_decoupled_grad": True,
        "store_param_remainders": True,
    }
    optimizer = FusedAdam(make_params(), 1e-3, (0.9, 0.95), 1e-8, 0.1, False, **settings)
    assert "amsgrad" not in optimizer.param_groups[0]
    assert FusedAdam(make_params(), 1e-3, (0.9, 0.95), 1e-8, 0.1, True).settings.amsgrad
