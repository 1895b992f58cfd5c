"""What steers a step on the device: clipping and the skip of non-finite gradients."""

import copy
import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from adam_helpers import (
    assert_equal,
    by_tensor_code,
    copies_of,
    flatten,
    grad_of,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam, Muon
from helpers import no_host_sync


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_nothing_and_is_counted(
    device: torch.device, dtype: torch.dtype
) -> None:
    params = make_params(dtype=dtype, device=device)
    optimizer = FusedAdam(params, master_weights=True, amsgrad=True)
    go, skip = torch.zeros((), device=device), torch.ones((), device=device)
    set_grads(params)
    optimizer.step(found_inf=go)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    weights = copies_of(params)
    params[0].grad = torch.full_like(params[0], math.nan)
    optimizer.step(found_inf=skip)
    assert_equal(params, weights)
    for index, entries in optimizer.state_dict()["state"].items():
        for key, tensor in entries.items():
            assert torch.equal(tensor, before[index][key]), key
    assert optimizer.control.skipped_steps.item() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bias_correction_is_right_after_a_skip(device: torch.device, bad: float) -> None:
    params, twins = make_twins(device=device)
    ours = FusedAdam(params, lr=0.1, skip_nonfinite=True)
    theirs = FusedAdam(twins, lr=0.1)
    for step in range(5):
        set_grads(params, twins)
        if step in (0, 3):  # the first one too: state is made, and not stepped
            grad_of(params[1])[3] = bad
        ours.step()
        if step not in (0, 3):
            theirs.step()
    assert_equal(params, twins)
    assert ours.control.skipped_steps.item() == 2
    assert {state["step"].item() for state in ours.state.values()} == {3}


@given(
    max_norm=st.sampled_from([1e-3, 0.5, 1e6]),
    size=st.sampled_from([1e-12, 1.0, 1e12]),
    flat=st.booleans(),
)
def test_clipping_is_that_of_torch(max_norm: float, size: float, flat: bool) -> None:
    params, twins = make_twins()
    set_grads(params, twins)
    for param in (*params, *twins):
        grad_of(param).mul_(size)
    if flat:
        flatten(params)
    ours = FusedAdam(params, max_grad_norm=max_norm, bias_correction=False)
    theirs = FusedAdam(twins, bias_correction=False)
    ours.step()
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


def test_scaled_gradients_are_unscaled_before_they_are_clipped(device: torch.device) -> None:
    params, twins = make_twins(device=device)
    ours, theirs = (FusedAdam(members, max_grad_norm=0.5) for members in (params, twins))
    for _ in range(3):
        set_grads(params, twins)
        for param in params:
            grad_of(param).mul_(1024)
        ours.step(grad_scale=torch.tensor(1 / 1024, device=device))
        theirs.step()
    assert_equal(params, twins)  # a power of two changes no bit
    assert torch.equal(ours.control.grad_norm, theirs.control.grad_norm)


def test_a_state_without_control_keeps_that_of_the_optimizer() -> None:
    params = make_params()
    optimizer = FusedAdam(params, skip_nonfinite=True)
    optimizer.control.skipped_steps.fill_(3)
    take_steps(1, optimizer)
    twins = copies_of(params)
    theirs = torch.optim.AdamW(twins)
    take_steps(1, theirs)
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.control.skipped_steps.item() == 3


@pytest.mark.parametrize("setting", ["max_grad_norm", "skip_nonfinite"])
def test_a_common_norm_of_gradients_on_several_devices_is_refused_by_name(setting: str) -> None:
    here, there = make_params([(2,)])[0], nn.Parameter(torch.empty(2, device="meta"))
    words = r"'here' is on cpu and parameter 'there' on meta\. Remedy: an optimizer for each device"
    with pytest.raises(ConfigError, match=words):
        FusedAdam([("here", here), ("there", there)], **{setting: 1.0})  # type: ignore[arg-type]
    FusedAdam([here, there])
    optimizer = FusedAdam([here], **{setting: 1.0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="parameter 0 of group 1 on meta"):
        optimizer.add_param_group({"params": [there]})
    assert len(optimizer.param_groups) == 1


def test_a_norm_beyond_the_range_of_float32_is_skipped_as_the_document_says() -> None:
    params, before = make_twins()
    optimizer = FusedAdam(params, lr=0.1, skip_nonfinite=True)
    for param in params:
        param.grad = torch.full_like(param, 1e25)
    optimizer.step()
    assert_equal(params, before)
    assert optimizer.control.skipped_steps.item() == 1
