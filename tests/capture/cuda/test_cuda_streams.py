"""Streams and events of the product."""

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import CaptureError, Phase
from graphfsdp.bench.clock import time_window
from graphfsdp.optim import FusedAdam
from unjoined_stream import leaves_a_stream_unjoined
from zoo_models import WIDTH, Squared

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def make_step(loss_fn: Callable[..., Tensor]) -> graphfsdp.CapturedStep:
    torch.manual_seed(0)
    model = Squared(nn.Linear(WIDTH, 8), nn.Dropout(0.1), nn.Linear(8, WIDTH)).to(CUDA)
    return graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.01), loss_fn=loss_fn)


def batch() -> Tensor:
    return torch.randn(12, WIDTH, device=CUDA)


def test_a_side_stream_that_is_not_joined_is_named_by_the_rules() -> None:
    step = make_step(leaves_a_stream_unjoined)
    for _ in range(3):
        step(batch())
    with pytest.raises(CaptureError, match="does not wait for") as caught:
        step(batch())
    assert caught.value.cuda_error == 904
    assert caught.value.source is not None
    assert caught.value.source.text == "(x * 2).sum()"
    step.close()


@pytest.mark.parametrize("in_backward", [False, True])
def test_side_streams_that_fork_and_join_are_part_of_the_graph(in_backward: bool) -> None:
    side = torch.cuda.Stream()

    def beside(tensor: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = tensor * 2
        torch.cuda.current_stream().wait_stream(side)
        return doubled

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if not in_backward:
            x = beside(x)
        loss: Tensor = model(x)
        if in_backward:
            loss.register_hook(beside)
        return loss

    with make_step(loss_fn) as step:
        for _ in range(6):
            step(batch())
        assert step.phase is Phase.REPLAY


def test_windows_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits twice: for an idle GPU before the window, and for its last event."""
    waits: list[str] = []
    wait_for_device, wait_for_event = torch.cuda.synchronize, torch.cuda.Event.synchronize

    def synchronize(device: torch.device | None = None) -> None:
        waits.append("device")
        wait_for_device(device)

    def synchronize_event(event: torch.cuda.Event) -> None:
        waits.append("event")
        wait_for_event(event)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", synchronize_event)
    window = time_window([lambda: None] * 4, CUDA)
    assert len(window.step_ms) == 4
    assert all(0 <= time_ms < 1000 for time_ms in window.step_ms)
    assert waits == ["device", "event"]


@pytest.mark.parametrize("waits", [False, True])
def test_the_thread_that_autograd_computes_gradients_on_is_watched_and_let_go(waits: bool) -> None:
    """Autograd takes the modes along to its thread of a GPU, and the profile hook not."""
    before = torch.cuda.Event()
    before.record()
    found: list[tuple[int, object]] = []

    def doubles(grad: Tensor) -> Tensor:
        grad = grad * 2
        if waits:
            before.wait()  # of before the iteration
        return grad

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.register_hook(doubles)
        return loss

    step = make_step(loss_fn)
    for _ in range(3):
        step(batch())
    words = "event that was recorded before it"
    with pytest.raises(CaptureError, match=words) if waits else nullcontext():
        step(batch())
    product = batch().requires_grad_() * 2
    product.register_hook(lambda grad: found.append((threading.get_ident(), sys.getprofile())))
    product.sum().backward()
    ((thread, profile),) = found
    assert thread != threading.get_ident()
    assert profile is None


def test_nobody_else_is_given_the_stream_that_captures() -> None:
    """torch hands the same 32 streams out again and again."""
    step = make_step(lambda model, x: model(x))
    for _ in range(5):
        step(batch())
    mine = step._engine.backend._stream  # type: ignore[attr-defined]
    assert mine.cuda_stream not in {torch.cuda.Stream().cuda_stream for _ in range(200)}
    step.close()
