"""The CUDA backend: what the driver refuses, one launch, batches of the host, and streams."""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_cuda_backend import batch, leaves_a_stream_unjoined
from test_cuda_backend import make_step as called
from torch import Tensor, nn

import graphfsdp
from allowed_programs import ALLOWED
from cuda_stand_in import library
from cuda_stand_in.orders import chosen
from forked_programs import forked
from graphfsdp import CaptureError, HazardKind, Phase
from graphfsdp.optim import FusedAdam
from helpers import line_of, no_host_sync
from make_step import make_step
from mid_forward import Inner, Probe, Program, make_probe
from refused_programs import REFUSED as PROGRAMS
from zoo import ZOO
from zoo_models import WIDTH, Squared, gpt

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def synchronize(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    torch.cuda.current_stream().synchronize()
    return h


def event_from_before(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    event: torch.cuda.Event | None = vars(self).get("event")
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
    event = vars(self)["event"] = torch.cuda.Event()
    event.record()
    return h


# What the driver refuses and no operator tells of: the kind, and the number of the error.
UNSEEN: dict[str, Program] = {
    "synchronize": synchronize,
    "loose_stream": lambda self, h, x: h + leaves_a_stream_unjoined(nn.Identity(), x),
    "event_from_before": event_from_before,
    "literal": lambda self, h, x: h * torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda"),
}
CODES = {"synchronize": 900, "loose_stream": 904, "event_from_before": 905, "literal": 900}
REFUSED: dict[str, Program] = {
    **{name: case.program for name, case in PROGRAMS.items() if case.driver and not case.cpu_only},
    **UNSEEN,
}
CONTROLS: dict[str, Program] = {name: ALLOWED[name] for name in ("where", "random", "einsum")}


def chain(error: BaseException) -> list[str]:
    """Return the messages of an error and of what led to it."""
    found: list[str] = []
    link: BaseException | None = error
    while link is not None:
        found.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or link.__context__
    return found


def without_rules(program: Program) -> dict[str, object]:
    """Capture an iteration with torch alone."""
    torch.manual_seed(0)
    model = Probe(program).to("cuda")
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 4, device="cuda")
    stream = torch.cuda.Stream()

    def iterate() -> None:
        optim.zero_grad(set_to_none=True)
        model(x).backward()
        optim.step()

    with torch.cuda.stream(stream):
        for _ in range(3):
            iterate()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            iterate()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        return {"errors": chain(error)}
    return {"errors": []}


def with_capture(program: Program) -> dict[str, object]:
    """Capture with graphfsdp what its rules cannot see; then go on eagerly."""
    step, model, _ = make_probe(program, CUDA)
    x = torch.randn(8, 4, device="cuda")
    for _ in range(3):
        step(x)
    before = [param.detach().clone() for param in model.parameters()]
    try:
        step(x)
    except graphfsdp.CaptureError as error:
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return {
            "errors": chain(error),
            "op": error.op,
            "code": error.cuda_error,
            "module": error.module_path,
            "line": None if error.source is None else error.source.text,
            "rolled_back": same,
        }
    return {"errors": []}


def tell(way: str, name: str) -> None:
    """Run the program of that name in one way, print what came of it, and end the process.

    A capture that the driver has broken leaves a process in a state that no other test should
    inherit: memory pools stay open, generators stay in capture mode.
    """
    run = {"without_rules": without_rules, "with_capture": with_capture}[way]
    print(json.dumps(run({**REFUSED, **CONTROLS}[name])), flush=True)
    os._exit(0)  # a broken capture may make the ordinary way out hang


def told(way: str, name: str) -> Any:
    """Run a program in a process of its own."""
    with forked(tell, way, name) as process:
        ended = process.ended()
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*REFUSED, *CONTROLS])
def test_the_driver_refuses_what_the_rules_refuse_and_captures_what_they_allow(name: str) -> None:
    """So the rules cannot drift: without them, torch.cuda.graph fails on the same program."""
    errors = told("without_rules", name)["errors"]
    assert ("captur" in " ".join(errors).lower()) if name in REFUSED else not errors, errors


@pytest.mark.parametrize("name", UNSEEN)
def test_errors_of_the_driver_are_explained_and_rolled_back(name: str) -> None:
    result = told("with_capture", name)
    assert result["errors"], "CUDA captured it"
    assert result["errors"][0].startswith("CaptureError: ")
    assert "Remedy: " in result["errors"][0]
    assert result["code"] == CODES[name]
    assert result["op"]
    assert result["module"] == "body.inner"
    assert result["line"]
    assert result["rolled_back"]


def test_an_iteration_is_one_graph_launch_and_allocates_nothing_that_stays() -> None:
    step, *_, next_batch = make_step(CUDA, "gpt", max_grad_norm=1.0)
    for _ in range(6):
        step(*next_batch())
    batch = next_batch()
    torch.cuda.synchronize()
    num_graphs, num_kernels = launched(lambda: step(*batch))
    assert num_graphs == 1
    # Beside it: copies into the static inputs and out of the graph's results.
    assert num_kernels <= 8
    levels = set()
    for _ in range(10):
        step(*batch)
        torch.cuda.synchronize()
        levels.add(torch.cuda.memory_allocated())
    assert len(levels) == 1


def launched(body: Callable[[], object]) -> tuple[int, int]:
    """Count the graphs and the kernels that something launches."""
    if library.is_below():  # which has no profiler
        before = library.counts()
        body()
        torch.cuda.synchronize()
        found = library.counts().since(before)
        return found.graphs, found.calls - found.graphs
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        body()
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    return counts.get("cudaGraphLaunch", 0), counts.get("cudaLaunchKernel", 0)


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_on_the_host_are_copied_without_a_host_sync(pinned: bool) -> None:
    """The same memory is filled anew as soon as the call returns, and each batch arrives."""
    step, *_ = make_step(CUDA, "gpt", loss_fn=weighted)
    x = torch.empty(4096, 64, pin_memory=pinned)
    sums = []
    expected = []
    # Above the stand-in nothing runs before something waits for it, as a busy GPU may do.
    with chosen(streams=5) if library.is_below() else nullcontext():
        for index in range(20):
            x.fill_(float(index))
            with no_host_sync(CUDA) if index > 5 else nullcontext():
                _, total = step(x)
            x.fill_(float("nan"))
            sums.append(total)
            expected.append(float(index) * 4096 * 64)
        assert [float(total) for total in sums] == expected


def weighted(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    weight = next(model.parameters())
    return weight.square().mean(), x.double().sum()


def test_old_graphs_of_the_default_stream_are_refused_with_a_remedy() -> None:
    """Their AccumulateGrad nodes remember the stream that they were made on."""
    torch.manual_seed(0)
    model = gpt().to(CUDA)
    generator = torch.Generator().manual_seed(1)
    old = model(*ZOO["gpt"].batch(generator).to(CUDA).args)
    step = graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.01))
    for _ in range(3):
        step(*ZOO["gpt"].batch(generator).to(CUDA).args)
    with pytest.raises(graphfsdp.CaptureError, match="Remedy: delete losses"):
        step(*ZOO["gpt"].batch(generator).to(CUDA).args)
    del old
    for _ in range(6):
        step(*ZOO["gpt"].batch(generator).to(CUDA).args)
    assert step.report().num_captures == 1


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

    step = called(loss_fn, 3)
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

    with called(loss_fn, 6) as step:
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

    step = called(loss_fn, 3)
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
    step = called(lambda model, x: model(x), 5)
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
