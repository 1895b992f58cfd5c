"""Surprises that are errors, or no surprises any more; the table is in test_footguns.py."""

import random
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from footgun_net import Net, inputs, start


def test_a_batch_of_one_raises(device: torch.device) -> None:
    step, *_ = start(device)
    for _ in range(5):
        step(inputs(device))
    # copy_ would broadcast it eight times over.
    with pytest.raises(graphfsdp.BatchMismatchError, match=r"\(8, 4\).*\(1, 4\)"):
        step(inputs(device)[:1])


def test_a_float_weight_decay_of_torch_is_guarded(device: torch.device) -> None:
    model = Net().to(device)
    optim = torch.optim.AdamW(
        model.parameters(), lr=0.1, fused=True, capturable=device.type == "cuda"
    )
    step = graphfsdp.capture(model, optim)
    for _ in range(5):
        step(inputs(device))
    optim.param_groups[0]["weight_decay"] = 0.05
    with pytest.raises(graphfsdp.GuardError, match=r"'weight_decay'.*0\.01.*0\.05"):
        step(inputs(device))


def test_losses_are_distinct(device: torch.device) -> None:
    step, *_ = start(device, lr=0.1)
    losses = [step(inputs(device)) for _ in range(8)]
    assert len({float(loss) for loss in losses}) == 8
    assert len({loss.data_ptr() for loss in losses}) == 8


def test_zero_grad_does_no_harm(device: torch.device) -> None:
    runs = []
    for zero in (False, True):
        step, model, optim = start(device, lr=0.1)
        for _ in range(8):
            if zero:
                optim.zero_grad()
            loss = step(inputs(device))
        assert model.layer.weight.grad is not None
        runs.append((float(loss), model.layer.weight.grad.clone()))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


def test_a_python_counter_raises(device: torch.device) -> None:
    count = {"calls": 0}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        count["calls"] += 1
        loss: Tensor = model(x) * count["calls"]
        return loss

    step, *_ = start(device, loss_fn)
    for _ in range(4):  # the fourth is undone and done again, in case it was only this once
        step(inputs(device))
    with pytest.raises(graphfsdp.CaptureError, match=r"was given 5 .* and 6 .*Python value"):
        step(inputs(device))


def test_numpy_randomness_raises(device: torch.device) -> None:
    step, *_ = start(device, lambda model, x: model(x) * float(numpy.random.rand()))
    for _ in range(4):
        step(inputs(device))
    with pytest.raises(graphfsdp.CaptureError, match=r"Python value .* torch\.rand"):
        step(inputs(device))


SCALE = 1.0
Change = Callable[[Any], Any]
# What changes it, what takes that back, and how it is named.
CHANGES: dict[str, tuple[Change, Change, str]] = {
    "changed_globals_raise": (
        lambda run: globals().update(SCALE=2.0),
        lambda run: globals().update(SCALE=1.0),
        r"global variable 'SCALE' .* was 1\.0 .* 2\.0",
    ),
    "a_changed_list_raises": (
        lambda run: run.history.append(2.0),
        lambda run: run.history.pop(),
        r"1 of closure variable 'history' of .* missing",
    ),
    "a_branch_on_python_state_raises": (
        lambda run: run.switch.update(on=True),
        lambda run: run.switch.update(on=False),
        r"'on' of closure variable 'switch' .*False.*True",
    ),
    "module_attributes_raise": (
        lambda run: setattr(run.model.dropout, "p", 0.9),
        lambda run: setattr(run.model.dropout, "p", 0.0),
        r"'dropout\.p' was 0\.0 .* now 0\.9",
    ),
    "freezing_after_the_capture_raises": (
        lambda run: run.layer.weight.requires_grad_(False),
        lambda run: run.layer.weight.requires_grad_(True),
        r"'layer\.weight' was trained .* now frozen",
    ),
    "a_replaced_module_raises": (
        lambda run: setattr(run.model, "layer", nn.Linear(4, 4).to(run.layer.weight.device)),
        lambda run: setattr(run.model, "layer", run.layer),
        "module 'layer' was a Linear",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_capture_raises(name: str, device: torch.device) -> None:
    change, undo, match = CHANGES[name]
    history, switch = [1.0], {"on": False}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x) * history[-1] * SCALE
        return loss * 100 if switch["on"] else loss

    step, model, _ = start(device, loss_fn)
    run = types.SimpleNamespace(model=model, layer=model.layer, history=history, switch=switch)
    losses = [float(step(inputs(device))) for _ in range(5)]
    change(run)
    try:
        with pytest.raises(graphfsdp.GuardError, match=match):
            step(inputs(device))
    finally:
        undo(run)
    assert float(step(inputs(device))) == losses[-1]


def test_replaced_state_raises(device: torch.device) -> None:
    def loss_fn(model: Any, x: Tensor) -> Tensor:
        model.average = model.average * 0.9 + x.mean()
        loss: Tensor = model(x) * model.average
        return loss

    step, model, _ = start(device, loss_fn)
    model.register_buffer("average", torch.zeros((), device=device))
    for _ in range(3):
        step(inputs(device))
    with pytest.raises(graphfsdp.CaptureError, match="replaced 'average' by a new tensor"):
        step(inputs(device))


def test_an_old_graph_raises(device: torch.device) -> None:
    """The weights that an older forward pass saved have been written since."""
    step, model, _ = start(device, lr=0.1)
    for _ in range(5):
        step(inputs(device))
    hidden = model.layer(inputs(device).requires_grad_()).square().mean()
    step(inputs(device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.backward()


def test_a_swallowed_read_raises(device: torch.device) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        try:
            return loss * loss.item()
        except Exception:
            return loss

    step, *_ = start(device, loss_fn)
    for _ in range(3):
        step(inputs(device))
    with pytest.raises(graphfsdp.CaptureError, match="on the host"):
        step(inputs(device))


def test_a_counter_in_a_buffer_counts(device: torch.device) -> None:
    count = torch.zeros((), device=device)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        count.add_(1)
        loss: Tensor = model(x) * count
        return loss

    step, *_ = start(device, loss_fn)
    losses = [float(step(inputs(device))) for _ in range(8)]
    assert [round(loss / losses[0]) for loss in losses] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_changed_weight_is_seen_when_it_is_written_in_place(device: torch.device) -> None:
    step, model, _ = start(device)
    for _ in range(5):
        step(inputs(device))
    with torch.no_grad():
        model.layer.weight.zero_()
        model.layer.bias.fill_(3.0)
    assert float(step(inputs(device))) == 9.0


def test_autocast_around_the_loop_uses_no_stale_weights(device: torch.device) -> None:
    """Its cache of casted weights outlives a call, and the weights change in between."""
    runs = []
    for scope in ("none", "forward_backward", "full_iteration"):
        step, *_ = start(device, lr=0.1, scope=scope)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            runs.append([float(step(inputs(device))) for _ in range(10)])
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == 10
    by_hand, model, optim = start(device, lr=0.1, scope="none")
    by_hand.close()
    for loss in runs[0]:
        optim.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            mine = model(inputs(device))
        assert float(mine.detach()) == loss
        mine.backward()
        optim.step()


@pytest.mark.parametrize("move", ["data", "to", "assign", "buffer"])
def test_moved_parameters_raise(move: str, device: torch.device) -> None:
    step, model, _ = start(device, lr=0.1)
    model.register_buffer("statistic", torch.zeros(2, device=device))
    for _ in range(5):
        step(inputs(device))
    before = [param.detach().clone() for param in model.parameters()]
    if move == "data":
        model.layer.weight.data = model.layer.weight.data.clone()
    elif move == "to":
        model.to(torch.float64)
    elif move == "assign":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    else:
        model.statistic = torch.ones(2, device=device)
    with pytest.raises(graphfsdp.GuardError, match="other memory"):
        step(inputs(device))
    pairs = zip(before, model.parameters(), strict=True)
    assert all(torch.equal(old, now.to(old.dtype)) for old, now in pairs)
    step.close()


def test_python_randomness_raises(device: torch.device) -> None:
    for draw in (random.random, random.Random(1).random, lambda: random.uniform(0.0, 1.0)):
        step, *_ = start(device, lambda model, x, draw=draw: model(x) * draw())
        for _ in range(3):
            step(inputs(device))
        with pytest.raises(graphfsdp.CaptureError, match=r"random.Random.random draws"):
            step(inputs(device))


def test_training_mode_raises(device: torch.device) -> None:
    step, model, _ = start(device)
    model.dropout.p = 0.5
    for _ in range(5):
        step(inputs(device))
    model.eval()
    assert torch.equal(model(inputs(device)), model(inputs(device)))
    with pytest.raises(graphfsdp.GuardError, match=r"now in eval mode.*model\.train\(\)"):
        step(inputs(device))
    model.train()
    assert float(step(inputs(device))) != float(step(inputs(device)))


def test_late_hooks_raise(device: torch.device) -> None:
    step, model, optim = start(device)
    for _ in range(5):
        step(inputs(device))
    calls: list[str] = []
    model.register_forward_hook(lambda *args: calls.append("forward"))
    model.layer.weight.register_hook(lambda grad: calls.append("gradient"))
    optim.register_step_post_hook(lambda *args: calls.append("step"))
    with pytest.raises(graphfsdp.GuardError, match=r"(?s)forward hook.*gradient hook.*step post"):
        step(inputs(device))
    assert calls == []


def test_autocast_around_the_call_raises(device: torch.device) -> None:
    step, *_ = start(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for _ in range(6):
            step(inputs(device))
    with pytest.raises(graphfsdp.GuardError, match=f"autocast on {device.type} was on .* off"):
        step(inputs(device))
