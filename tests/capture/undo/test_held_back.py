"""Fused steps of optimizers that wait under an undo: what waits, and what makes it run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphfsdp._capture.undo.copy_on_write import CopyOnWrite
from graphfsdp._capture.undo.held_back import FUSED_STEPS
from graphfsdp.optim import FusedAdam, FusedSGD
from helpers import snapshot


@pytest.fixture
def stepping() -> tuple[CopyOnWrite, nn.Linear, Callable[..., Any], dict[str, Tensor]]:
    """An undo, a model with gradients, its step, and how everything was before."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optim = FusedAdam(model.parameters(), lr=0.1)
    for _ in range(2):  # so that there is state
        optim.zero_grad()
        model(torch.randn(3, 64)).sum().backward()
        optim.step()
    return CopyOnWrite(), model, optim.step, snapshot(model, optim)


def test_a_step_waits_for_keep_and_does_then_what_it_would_have_done(stepping: Any) -> None:
    undo, model, step, before = stepping
    with undo.watching(waiting=FUSED_STEPS):
        step()
    assert torch.equal(model.weight, before["parameter weight"])
    undo.keep()
    after = model.weight.detach().clone()
    assert not torch.equal(after, before["parameter weight"])
    with torch.no_grad():
        model.weight.copy_(before["parameter weight"])
        model.bias.copy_(before["parameter bias"])
    state = step.__self__.state
    for index, param in enumerate(model.parameters()):
        for name, value in state[param].items():
            value.copy_(before[f"state {name} of parameter {index}"])
    step()
    assert torch.equal(model.weight, after)


def test_what_waits_is_dropped_by_a_roll_back(stepping: Any) -> None:
    undo, model, step, before = stepping
    with undo.watching(waiting=FUSED_STEPS):
        step()
    undo.roll_back()
    undo.keep()
    assert torch.equal(model.weight, before["parameter weight"])


@pytest.mark.parametrize(
    "touch",
    [
        lambda model: model.weight.sum(),
        lambda model: model.weight.view(-1)[3:5] * 2,
        lambda model: model.weight.data.zero_(),
        lambda model: model.weight.grad.zero_(),
    ],
    ids=["read", "read_a_view", "write", "write_a_gradient"],
)
def test_whoever_touches_it_finds_it_done_and_it_can_be_undone(
    stepping: Any, touch: Callable[[nn.Linear], object]
) -> None:
    undo, model, step, before = stepping
    seen = []
    with undo.watching(waiting=FUSED_STEPS):
        step()
        touch(model)
        seen.append(model.bias.detach().clone())
    assert not torch.equal(seen[0], before["parameter bias"])
    undo.roll_back()
    assert torch.equal(model.weight, before["parameter weight"])
    assert torch.equal(model.weight.grad, before["grad of weight"])


def test_looking_at_it_anew_or_at_what_it_reads_leaves_it_waiting(stepping: Any) -> None:
    undo, model, step, before = stepping
    with undo.watching(waiting=FUSED_STEPS):
        step()
        view = model.weight.detach().t()
        torch.empty_like(model.weight)
        model.weight.grad.sum()
        torch.ones(3).add_(1)
    assert torch.equal(view.t(), before["parameter weight"])
    undo.keep()
    assert not torch.equal(view.t(), before["parameter weight"])


def test_numbers_that_others_change_behind_it_are_those_of_its_call() -> None:
    param = nn.Parameter(torch.ones(8, 8))
    param.grad = torch.ones(8, 8)
    optim = FusedSGD([param], lr=0.5)
    optim.step()
    scale, undo = torch.tensor(2.0), CopyOnWrite()
    expected = param.detach() - 0.5 * 2.0
    with undo.watching(waiting=FUSED_STEPS):
        optim.step(grad_scale=scale)
        scale.fill_(100.0)  # as a gradient scaler does for the next iteration
    undo.keep()
    assert torch.equal(param, expected)


def test_gradients_of_the_iteration_itself_are_not_kept_alive_for_it() -> None:
    param = nn.Parameter(torch.ones(64, 64))
    optim = FusedSGD([param], lr=0.5)
    param.grad = torch.ones(64, 64)
    optim.step()
    undo = CopyOnWrite()
    with undo.watching(waiting=FUSED_STEPS):
        param.grad = torch.full((64, 64), 2.0) * 1
        optim.step()
        assert torch.equal(param.detach(), torch.full((64, 64), -0.5))
    undo.roll_back()
    assert torch.equal(param.detach(), torch.full((64, 64), 0.5))


def test_a_step_that_reads_what_a_waiting_one_writes_finds_it_written() -> None:
    """The second optimizer's gradient is the weight of the first."""
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
    one, other = FusedSGD([first], lr=1.0), FusedSGD([second], lr=1.0)
    first.grad, second.grad = torch.ones(4), torch.zeros(4)
    one.step()
    other.step()
    second.grad = first.detach()
    other.step()
    undo = CopyOnWrite()
    with undo.watching(waiting=FUSED_STEPS):
        one.step()
        other.step()
    undo.keep()
    assert torch.equal(first.detach(), torch.full((4,), -1.0))
    assert torch.equal(second.detach(), torch.ones(4))
