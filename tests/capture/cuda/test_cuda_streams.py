"""Streams and events of the product on a played device."""

import queue
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fake_cuda import DEVICE, FakeCuda, batch, leaves_a_stream_unjoined, make_step
from graphfsdp import CaptureError, Phase
from graphfsdp._capture.rules.watcher import DispatchMode, Watcher
from graphfsdp.bench.clock import time_window
from graphfsdp.optim.offload.parts import SideCopies


def test_a_side_stream_that_is_not_joined_is_named_by_the_rules(on_played_device: FakeCuda) -> None:
    step = make_step(leaves_a_stream_unjoined)
    for _ in range(3):
        step(batch())
    with pytest.raises(CaptureError, match="does not wait for") as caught:
        step(batch())
    assert caught.value.cuda_error == 904
    assert caught.value.source is not None
    assert caught.value.source.text == "(x * 2).sum()"
    assert on_played_device.under_way == []
    step.close()


@pytest.mark.parametrize("in_backward", [False, True])
def test_side_streams_that_fork_and_join_are_part_of_the_graph(
    on_played_device: FakeCuda, in_backward: bool
) -> None:
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


def test_windows_are_timed_by_events(played_cuda: FakeCuda) -> None:
    window = time_window([lambda: None] * 4, DEVICE)
    assert window.step_ms == (1.0,) * 4
    assert played_cuda.log == ["synchronize", "wait for an event"]


@pytest.mark.parametrize("overlap", [False, True])
def test_copies_of_offloaded_state_use_streams_of_their_own(
    played_cuda: FakeCuda, overlap: bool
) -> None:
    copies = SideCopies(DEVICE, overlap=overlap)
    copies.fork()
    with copies.downwards():
        down = played_cuda.stream
        arrived = copies.arrival()
    with copies.upwards():
        up = played_cuda.stream
    arrived()
    copies.join()
    assert played_cuda.stream == 0
    assert len({0, down, up}) == (3 if overlap else 1)
    assert played_cuda.log == ["wait for an event"]


def test_the_thread_that_autograd_computes_gradients_on_is_watched_and_let_go(
    played_cuda: FakeCuda,
) -> None:
    """Autograd takes the modes along to its thread of a GPU, and the profile hook not."""
    watcher = Watcher(nn.Linear(1, 1), DEVICE, defers_refusals=True)
    orders: queue.Queue[Callable[[], object] | None] = queue.Queue()
    answers: queue.Queue[object] = queue.Queue()

    def obey() -> None:
        while (order := orders.get()) is not None:
            answers.put(order())

    def ask(order: Callable[[], object]) -> object:
        orders.put(order)
        return answers.get(timeout=20)

    def on_the_thread() -> None:
        with DispatchMode(watcher):
            torch.ones(2).mul_(2)
        torch.cuda.Event().wait()  # of before the iteration

    def watch() -> None:
        with watcher.watching():
            watcher.follow_streams()
            ask(on_the_thread)

    worker = threading.Thread(target=obey)
    worker.start()
    try:
        with pytest.raises(CaptureError, match="event that was recorded before it"):
            watch()
        ask(lambda: None)
        assert ask(sys.getprofile) is None
    finally:
        orders.put(None)
        worker.join()
