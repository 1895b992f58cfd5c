"""What steers a step on the device: clipping, and steps that are left out.

Any optimizer leaves out what is not finite: test_optimizer_replays.py.
"""

import itertools
from contextlib import nullcontext
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
    flatten,
    grad_of,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
from counting_net import mean_square
from graphfsdp.optim import FusedAdam, Muon
from helpers import NUM_STEPS, make_optimizer, no_host_sync


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
