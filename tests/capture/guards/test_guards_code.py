"""Replaced code and what it reads: functions, hooks and order that a replay would not see."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam

SCALE = 2.0
CONFIG = types.SimpleNamespace(
    model=types.SimpleNamespace(alpha=2.0, unread=1.0), log=types.SimpleNamespace(level=3)
)
Undo = Callable[[], Any]


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Net(nn.Module):
    """Names functions and numbers of this file in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(scaled(functional.silu(self.first(x))))

    def mixed(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x) * SCALE
        return result


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) * CONFIG.model.alpha).square().mean()
    return loss


def reverse(table: dict[str, Any]) -> Undo:
    old = dict(table)
    table.clear()
    table.update(dict(reversed(old.items())))

    def undo() -> None:
        table.clear()
        table.update(old)

    return undo


Change = Callable[[Net, torch.optim.Optimizer, pytest.MonkeyPatch], Undo | None]
REFUSED: dict[str, tuple[Change, str]] = {
    "number_of_forward": (
        lambda net, optim, patch: patch.setitem(globals(), "SCALE", 3.0),
        r"global variable 'SCALE' .* was 2\.0 .* now 3\.0",
    ),
    "own_function": (
        lambda net, optim, patch: patch.setitem(globals(), "scaled", lambda x: x),
        r"global variable 'scaled' .* one function .* another function",
    ),
    "named_function_of_torch": (
        lambda net, optim, patch: patch.setattr(functional, "silu", functional.relu),
        "function 'silu' of torch.nn.functional",
    ),
    "step_of_the_optimizer": (
        lambda net, optim, patch: patch.setattr(optim, "step", lambda *args: None, raising=False),
        r"FusedAdam\.step was one function",
    ),
    "step_of_its_class": (
        lambda net, optim, patch: patch.setattr(type(optim), "step", lambda self: None),
        r"FusedAdam\.step was one function",
    ),
    "order": (
        lambda net, optim, patch: reverse(net.body._modules),
        r"the order of the modules in 'body' was 0, 1, 2 .* is now 2, 1, 0",
    ),
}


def start() -> tuple[Any, Net, FusedAdam, Tensor]:
    torch.manual_seed(0)
    net = Net()
    optim = FusedAdam(net.parameters(), lr=0.01)
    step = graphfsdp.capture(net, optim, loss_fn=loss_of, warmup_steps=1)
    x = torch.randn(4, 3)
    for _ in range(3):
        step(x)
    return step, net, optim, x


@pytest.mark.parametrize("name", REFUSED)
def test_replaced_code_is_refused_by_name_until_it_is_put_back(name: str) -> None:
    change, message = REFUSED[name]
    step, net, optim, x = start()
    with pytest.MonkeyPatch.context() as patch:
        undo = change(net, optim, patch)
        with pytest.raises(graphfsdp.GuardError, match=message):
            step(x)
        if undo is not None:
            undo()
    step(x)
    assert step.report().num_captures == 1


def test_what_the_iteration_does_not_read_may_change() -> None:
    step, _, optim, x = start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CONFIG.model, "unread", 5.0)
        patch.setattr(CONFIG.log, "level", 5)
        patch.setattr(functional, "celu", functional.relu)
        patch.setitem(globals(), "Undo", None)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optim)  # wraps optim.step
        for _ in range(2):
            step(x)
            scheduler.step()
    assert step.report().num_calls["replay"] == 3


def test_batch_norm_with_a_cumulative_average_is_refused_with_its_own_remedy() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None))
    step = graphfsdp.capture(
        model,
        FusedAdam(model.parameters()),
        loss_fn=lambda model, x: model(x).square().mean(),
        warmup_steps=1,
    )
    step(torch.randn(4, 3))
    with pytest.raises(graphfsdp.CaptureError) as caught:
        step(torch.randn(4, 3))
    assert "BatchNorm1d(momentum=None)" in str(caught.value)
    assert "the default 0.1" in caught.value.hazard.fix
    assert caught.value.module_path == "1"
