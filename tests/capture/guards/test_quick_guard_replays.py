"""Guards that look at memory find in replays what guards find that ask each object."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_quick_guard import HAS_ATTRIBUTES, assign
from torch import Tensor, nn

import graphfsdp
from graphfsdp._capture.guards.process_memory import ProcessMemory
from graphfsdp._capture.guards.tensors import TensorGuard
from guard_net import Guarded, refused, start
from helpers import make_optimizer

CHANGES: dict[str, tuple[Callable[[Guarded], Any], str]] = {
    "address": (
        lambda run: assign(Tensor.clone)(run.model.body.layers[0].weight),  # type: ignore[arg-type]
        "body.layers.0.weight.* was at address",
    ),
    "requires_grad": (
        lambda run: run.model.scale.requires_grad_(False),
        "'scale' was trained",
    ),
    "mode": (lambda run: run.model.body.dropout.eval(), "'body.dropout' was in train mode"),
    "number": (
        lambda run: setattr(run.model.body, "temperature", 3.0),
        "'body.temperature' was 2.0 .* is now 3.0",
    ),
    "hook": (
        lambda run: run.model.body.register_forward_hook(lambda *args: None),
        "forward hook .* was absent",
    ),
    "hook by hand": (
        lambda run: run.model.body._forward_hooks.update({-1: lambda *args: None}),
        "forward hook .* was absent",
    ),
    "buffer": (
        lambda run: setattr(run.model.body, "table", torch.ones(4)),
        "buffer 'body.table' was one tensor",
    ),
    "class": (
        lambda run: setattr(run.model.body.dropout, "__class__", nn.AlphaDropout),
        "class of 'body.dropout'",
    ),
    "state": (
        lambda run: run.optim.state[run.model.scale].update(exp_avg=torch.zeros(())),
        "optimizer state 'exp_avg' of 'scale'",
    ),
}


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_guards_find_the_same_with_and_without_words(
    name: str, readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessMemory, "is_readable", staticmethod(lambda: readable))
    guarded = start()
    change, match = CHANGES[name]
    change(guarded)
    refused(guarded, match)
    guarded.step.close()


@pytest.mark.skipif(not HAS_ATTRIBUTES, reason="attributes are asked for on this Python")
def test_replays_ask_each_object_only_after_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_asked = 0
    asks = TensorGuard.holds

    def count(guard: TensorGuard) -> bool:
        nonlocal num_asked
        num_asked += 1
        return asks(guard)

    monkeypatch.setattr(TensorGuard, "holds", count)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optim = make_optimizer("fused_adam", model.parameters(), torch.device("cpu"))
    with graphfsdp.capture(model, optim, loss_fn=lambda model, x: model(x).mean()) as step:
        for index in range(14):
            if index == 9:
                model.eval()
                model.train()
            step(torch.randn(2, 4))
            if index == 8:
                once = num_asked
        assert once > 0
        assert num_asked == 2 * once, "once after the capture, once after validation"
