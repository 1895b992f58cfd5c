"""What steers a step on the device: clipping and the skip of non-finite gradients."""

import itertools
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
from graphfsdp.optim import FusedAdam, Muon
from helpers import no_host_sync


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


def test_a_norm_beyond_the_range_of_float32_is_skipped_as_the_document_says() -> None:
    params, before = make_twins()
    optimizer = FusedAdam(params, lr=0.1, skip_nonfinite=True)
    for param in params:
        param.grad = torch.full_like(param, 1e25)
    optimizer.step()
    assert_equal(params, before)
    assert optimizer.control.skipped_steps.item() == 1
