"""undo="none": no copies are kept, and a warm-up that fails leaves the step broken, loudly."""

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import CapturedStep, Phase
from graphfsdp.optim import FusedAdam
from helpers import assert_same_states, check_against_eager, snapshot
from zoo import ZOO
from zoo_models import WIDTH, Squared

Switch = dict[str, bool]


def make(
    device: torch.device, switch: Switch, undo: str
) -> tuple[CapturedStep, nn.Module, FusedAdam]:
    torch.manual_seed(0)
    model = Squared(nn.Linear(WIDTH, 8), nn.Dropout(0.1), nn.Linear(8, WIDTH)).to(device)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        if switch["on"]:
            raise ValueError("a mistake")
        return loss

    optimizer = FusedAdam(model.parameters(), lr=0.01)
    return graphfsdp.capture(model, optimizer, loss_fn=loss_fn, undo=undo), model, optimizer


def test_training_is_the_same_without_copies(device: torch.device) -> None:
    check_against_eager(ZOO["mlp"], device, undo="none")


def test_a_warm_up_that_fails_breaks_the_step(device: torch.device) -> None:
    switch = {"on": False}
    step, _, _ = make(device, switch, "none")
    x = torch.randn(6, WIDTH, device=device)
    step(x)
    switch["on"] = True
    with pytest.raises(ValueError, match="a mistake"):
        step(x)
    assert step.phase is Phase.BROKEN
    switch["on"] = False
    with pytest.raises(graphfsdp.PhaseError, match="undo='none'"):
        step(x)
    step.close()


def test_a_capture_that_fails_leaves_no_trace_all_the_same(device: torch.device) -> None:
    """On a GPU nothing of it has run; on a CPU copies are kept for this one iteration."""
    switch = {"on": False}
    step, model, optimizer = make(device, switch, "none")
    for _ in range(3):
        step(torch.randn(6, WIDTH, device=device))
    x = torch.randn(6, WIDTH, device=device)
    before = snapshot(model, optimizer)
    switch["on"] = True
    with pytest.raises(ValueError, match="a mistake"):
        step(x)
    switch["on"] = False
    assert_same_states([before], [snapshot(model, optimizer)])
    for _ in range(3):
        step(torch.randn(6, WIDTH, device=device))
    assert step.phase is Phase.REPLAY
    step.close()


@pytest.mark.gpu
def test_copies_that_the_machine_has_no_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the system would kill the process for them."""
    path = "graphfsdp._capture.cuda.host_copies.available_bytes"
    monkeypatch.setattr(path, lambda: 1000)
    step, model, optimizer = make(torch.device("cuda"), {"on": False}, "auto")
    x = torch.randn(6, WIDTH, device="cuda")
    before = snapshot(model, optimizer)
    with pytest.raises(graphfsdp.CaptureError, match=r"memory of the host.*undo='none'"):
        step(x)
    assert_same_states([before], [snapshot(model, optimizer)])
    step.close()
    step, _, _ = make(torch.device("cuda"), {"on": False}, "none")
    for _ in range(6):
        step(x)
    assert step.phase is Phase.REPLAY
    step.close()
