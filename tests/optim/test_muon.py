"""Muon: torch's numbers, its replays, its states, and sharded matrices."""

from typing import Any

import pytest
import torch

from adam_helpers import (
    assert_equal,
    copies_of,
    load_in_place,
    make_groups,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
from graphfsdp.optim import Muon

SHAPES: list[tuple[int, ...]] = [(20, 10), (7, 16), (5, 5), (1, 3)]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_nesterov": {"nesterov": False, "weight_decay": 0.0},
    "adamw_rms": {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8, "ns_steps": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_torch(device: torch.device, name: str) -> None:
    params, twins = make_twins(SHAPES, device=device)
    ours = Muon(params, lr=0.02, **SETTINGS[name])
    theirs = torch.optim.Muon(twins, lr=0.02, **SETTINGS[name])
    for step in range(20):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.02 / (1 + step)
        take_steps(1, ours, theirs)
    for param, twin in zip(params, twins, strict=True):
        # The directions are bfloat16: a rounding to the other side is 2**-8 of an entry, and the
        # iteration, whose slope is up to 3.4 a step, enlarges it. The path is 20 steps long.
        path = 0.02 * sum(1 / (1 + step) for step in range(20)) * 0.2 * max(param.shape) ** 0.5
        torch.testing.assert_close(param, twin, rtol=0, atol=0.05 * path)
    for param, twin in zip(params, twins, strict=True):
        buffers = ours.state[param]["momentum_buffer"], theirs.state[twin]["momentum_buffer"]
        torch.testing.assert_close(*buffers, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_told_to_skip_changes_nothing() -> None:
    params = make_params([(8, 4), (4,)])
    groups = make_groups({"params": params[:1]}, {"params": params[1:], "use_muon": False})
    optimizer = Muon(groups, lr=0.1)
    take_steps(1, optimizer)
    before = copies_of(params)
    states = [t.clone() for state in optimizer.state.values() for t in state.values()]
    for param in params:
        assert param.grad is not None
        param.grad.fill_(float("nan"))
    optimizer.step(found_inf=torch.tensor(1.0))
    assert_equal(params, before)
    other = Muon(make_groups(*optimizer.param_groups))
    other.load_state_dict(optimizer.state_dict())
    assert other.control.skipped_steps.item() == 1
    after = [t for state in optimizer.state.values() for t in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))
    set_grads(params)
    optimizer.step(found_inf=torch.tensor(0.0))
    assert not torch.equal(params[0], before[0])


def test_groups_without_muon_take_the_steps_of_adamw(device: torch.device) -> None:
    params, twins = make_twins([(8, 4), (4,), (2, 3, 4)], device=device)
    rest = {"params": params[1:], "use_muon": False, "lr": 0.01, "eps": 1e-8}
    ours = Muon(make_groups({"params": params[:1]}, rest), lr=0.1, betas=(0.8, 0.9))
    theirs = torch.optim.AdamW(twins[1:], lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    for _ in range(10):
        set_grads(params, twins)
        ours.step()
        theirs.step()
    for param, twin in zip(params[1:], twins[1:], strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


def test_a_state_of_torch_loads_in_place() -> None:
    params = make_params(SHAPES)
    source = torch.optim.Muon(params, lr=0.1)
    take_steps(1, source)
    twins = copies_of(params)
    target = Muon(twins, lr=0.3)
    load_in_place(source, target)
    assert target.param_groups[0]["lr"] == 0.1
    for param, twin in zip(params, twins, strict=True):
        buffers = source.state[param], target.state[twin]
        assert torch.equal(*(state["momentum_buffer"] for state in buffers))
