"""Streams and events of the product."""

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from test_cuda_backend import CUDA, batch, make_step
from torch import Tensor, nn

import graphfsdp
from cuda_stand_in import library
from cuda_stand_in.orders import chosen
from graphfsdp import CaptureError, HazardKind, Phase
from graphfsdp.optim import FusedAdam
from helpers import line_of
from zoo_models import WIDTH, Squared

pytestmark = pytest.mark.gpu


@dataclass
class Streams:
    """Two beside that of the iteration, and an event that was recorded before it."""

    side: torch.cuda.Stream
    third: torch.cuda.Stream
    before: torch.cuda.Event


def fork(tensor: Tensor, stream: torch.cuda.Stream, origin: torch.cuda.Stream) -> None:
    stream.wait_stream(origin)
    with torch.cuda.stream(stream):
        tensor.exp()


def joined_by_nobody(x: Tensor, streams: Streams) -> None:
    fork(x, streams.side, torch.cuda.current_stream())
    with torch.cuda.stream(streams.side):
        x.neg()  # refused
    fork(x, streams.third, streams.side)


def joined_through_another(x: Tensor, streams: Streams) -> None:
    fork(x, streams.side, torch.cuda.current_stream())
    fork(x, streams.third, streams.side)
    torch.cuda.current_stream().wait_stream(streams.third)


def used_after_the_join(x: Tensor, streams: Streams) -> None:
    fork(x, streams.side, torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(streams.side)
    with torch.cuda.stream(streams.side):
        x.neg()  # refused


def never_forked(x: Tensor, streams: Streams) -> None:
    with torch.cuda.stream(streams.side):
        x.neg_()  # refused
        x.neg_()


def joined_too_early(x: Tensor, streams: Streams) -> None:
    fork(x, streams.side, torch.cuda.current_stream())
    early = streams.side.record_event()
    with torch.cuda.stream(streams.side):
        x.neg()  # refused
    early.wait()


def waits_for_an_event_from_before(x: Tensor, streams: Streams) -> None:
    streams.before.wait()  # refused


@pytest.mark.parametrize(
    ("program", "words", "cuda_error"),
    [
        (joined_by_nobody, "does not wait for", 904),
        (used_after_the_join, "does not wait for", 904),
        (joined_too_early, "does not wait for", 904),
        (never_forked, "has not waited for the iteration's own stream", None),
        (waits_for_an_event_from_before, "event that was recorded before it", 905),
        (joined_through_another, "", None),
    ],
)
def test_each_stream_has_to_fork_and_to_join(
    program: Callable[[Tensor, Streams], None], words: str, cuda_error: int | None
) -> None:
    streams = Streams(torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event())
    streams.before.record()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        program(x, streams)
        loss: Tensor = model(x)
        return loss

    step = make_step(loss_fn, 3)
    if not words:
        step(batch())
        assert step.phase is Phase.REPLAY
        return
    with pytest.raises(CaptureError, match=words) as caught:
        step(batch())
    assert caught.value.kind is HazardKind.STREAM
    assert caught.value.cuda_error == cuda_error
    assert caught.value.source is not None
    assert caught.value.source.line == line_of(program, "# refused")
    step.close()


def test_side_streams_that_fork_and_join_in_a_backward_pass_are_part_of_the_graph() -> None:
    side = torch.cuda.Stream()

    def beside(grad: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = grad * 2
        torch.cuda.current_stream().wait_stream(side)
        return doubled

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.register_hook(beside)
        return loss

    with make_step(loss_fn, 6) as step:
        assert step.phase is Phase.REPLAY


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

    step = make_step(loss_fn, 3)
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
    step = make_step(lambda model, x: model(x), 5)
    mine = step._engine.backend._stream  # type: ignore[attr-defined]
    assert mine.cuda_stream not in {torch.cuda.Stream().cuda_stream for _ in range(200)}
    step.close()


@pytest.mark.parametrize("scope", ["none", "forward_backward", "full_iteration"])
def test_the_memory_of_a_result_goes_to_another_stream_when_it_was_read(scope: str) -> None:
    """Steps share the stream that they warm up on, and may be called on streams of their own."""
    batches = torch.randn(20, 12, WIDTH, device=CUDA)

    def totals(streams: list[torch.cuda.Stream]) -> list[Tensor]:
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.manual_seed(0)
                model = Squared(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)).to(CUDA)
                optimizer = FusedAdam(model.parameters(), lr=0.01)
                step = graphfsdp.capture(model, optimizer, scope=scope, warmup_steps=8)
                found.append((stream, step, torch.zeros((), device=CUDA)))
        torch.cuda.synchronize()
        for x in batches:
            for stream, step, total in found:
                with torch.cuda.stream(stream):
                    total += step(x)
                    assert torch.cuda.current_stream() == stream
        torch.cuda.synchronize()
        return [total for *_, total in found]

    expected = totals([torch.cuda.current_stream()] * 2)
    # Above the stand-in nothing runs before something waits for it, as on a busy GPU.
    with chosen(streams=3) if library.is_below() else nullcontext():
        found = totals([torch.cuda.Stream(), torch.cuda.Stream()])
    assert all(map(torch.equal, expected, found))
