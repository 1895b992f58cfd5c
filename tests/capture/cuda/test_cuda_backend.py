"""The CUDA backend below torch's own captures: what it leaves behind, also after errors."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import CaptureError, Phase
from graphfsdp._capture.cuda import host_copies
from graphfsdp._capture.cuda import recorder as cuda_driver
from graphfsdp._capture.cuda.host_copies import HostCopies, PinnedMemory
from graphfsdp.optim import FusedAdam
from zoo_models import WIDTH, Squared

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def make_step(
    loss_fn: Callable[..., Tensor] | None = None,
    num_calls: int = 0,
    *,
    device: torch.device = CUDA,
    **options: Any,
) -> graphfsdp.CapturedStep:
    """Return a step that has been called some times."""
    torch.manual_seed(0)
    model = Squared(nn.Linear(WIDTH, 8), nn.Dropout(0.1), nn.Linear(8, WIDTH)).to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    return call(graphfsdp.capture(model, optimizer, loss_fn=loss_fn, **options), num_calls)


def batch(rows: int = 12) -> Tensor:
    return torch.randn(rows, WIDTH, device=CUDA)


def call(step: graphfsdp.CapturedStep, num_calls: int, rows: int = 12) -> graphfsdp.CapturedStep:
    for _ in range(num_calls):
        step(batch(rows))
    return step


def leaves_a_stream_unjoined(model: nn.Module, x: Tensor) -> Tensor:
    """Fork a CUDA stream and never join it."""
    side = torch.cuda.Stream()
    while side == torch.cuda.current_stream():  # torch hands out few streams, again and again
        side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (x * 2).sum()
    loss: Tensor = model(x)
    return loss


def while_it_is_on(
    wrong: Callable[[nn.Module, Tensor], Tensor], switch: dict[str, bool]
) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return a loss function that does something wrong, until it is switched off."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if switch["on"]:
            return wrong(model, x)
        loss: Tensor = model(x)
        return loss

    return loss_fn


def private_pools() -> set[tuple[int, int]]:
    """Return the pools of graphs that the allocator still has memory in."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    pools = {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}
    return pools - {(0, 0)}


@pytest.fixture(autouse=True)
def _nothing_stays() -> Any:
    gc.collect()
    before = private_pools()
    yield
    gc.collect()
    assert private_pools() <= before
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.parametrize("first", range(2), ids=["either call", "that of CUDA 13"])
def test_the_driver_names_nodes_and_the_report_counts_them(
    first: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_driver, "_CAPTURE_INFO", cuda_driver._CAPTURE_INFO[first:])
    with make_step(num_calls=5) as step:
        report = step.report()
    assert report.num_nodes is not None
    assert report.num_nodes > 10
    assert sum(sum(counts.values()) for counts in report.by_kind.values()) == report.num_nodes
    assert any("gemm" in name.lower() or "cutlass" in name for name in report.by_kind["kernel"])
    assert any(name.startswith("kernel ") for name in report.by_module["layers.0"])
    assert report.pool_bytes > 0
    report.html(tmp_path / "page.html")
    name = next(iter(report.by_kind["kernel"]))
    assert name.partition("(")[0].partition("<")[0] in (tmp_path / "page.html").read_text()


def raises_in_capture(
    error: type[BaseException] | None, model: nn.Module, x: Tensor, generator: torch.Generator
) -> Tensor:
    """Break off between fork and join of a side stream; without an error, do what torch refuses."""
    if not torch.cuda.is_current_stream_capturing():
        loss: Tensor = model(x)
        return loss
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x = x * 2
        if error is not None:
            raise error(WORDS)
        return torch.rand(3, device=CUDA, generator=generator).sum() * x.sum()


WORDS = "what happened"
# Torch 2.14 and newer; before, a graph had to be told of generators.
FINDS_GENERATORS = hasattr(torch.cuda.CUDAGraph, "pools")


@pytest.fixture(params=[True, False], ids=["watched", "unwatched"])
def is_watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run with the watcher of streams, and without it, as torch.compile needs it."""
    if not request.param:
        for room in ("cuda.graph", "rules.constants"):
            path = f"graphfsdp._capture.{room}.has_compiled_regions"
            monkeypatch.setattr(path, lambda model: True)
    return bool(request.param)


def fails_once(
    wrong: Callable[[nn.Module, Tensor], Tensor], error: type[BaseException], words: str
) -> tuple[graphfsdp.CapturedStep, BaseException]:
    """Let a capture fail, go on to the first replays; return the step and what was raised."""
    switch = {"on": True}
    step = make_step(while_it_is_on(wrong, switch), 3)
    with pytest.raises(error, match=words) as caught:
        step(batch())
    torch.cuda.empty_cache()
    torch.rand(3, device=CUDA)  # torch alone leaves allocator and generators in the middle of it
    switch["on"] = False
    assert call(step, 3).phase is Phase.REPLAY
    return step, caught.value


@pytest.mark.usefixtures("is_watched")
@pytest.mark.parametrize(
    "error",
    [
        *(ValueError, KeyboardInterrupt, CaptureError),
        pytest.param(None, marks=pytest.mark.skipif(FINDS_GENERATORS, reason="it may draw")),
    ],
    ids=["error", "ctrl_c", "refusal", "refusal_of_torch"],
)
def test_the_first_error_of_a_capture_is_told(error: type[BaseException] | None) -> None:
    """Streams that it leaves unjoined make the end of the capture fail as well."""
    wrong = partial(raises_in_capture, error, generator=torch.Generator(CUDA))
    step, _ = fails_once(wrong, error or CaptureError, WORDS if error else "generator")
    step.close()


@pytest.mark.skipif(not FINDS_GENERATORS, reason="torch refuses it")
@pytest.mark.usefixtures("is_watched")
def test_a_generator_that_no_module_holds_goes_on_as_in_eager_iterations() -> None:
    def losses(scope: str) -> list[Tensor]:
        generator = torch.Generator(CUDA).manual_seed(5)

        def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x * torch.rand(WIDTH, device=CUDA, generator=generator))
            return loss

        with make_step(loss_fn, scope=scope) as step:
            torch.manual_seed(6)
            return [step(batch()) for _ in range(14)]

    for eager, replayed in zip(losses("none"), losses("full_iteration"), strict=True):
        assert torch.equal(eager, replayed)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("breaks", [False, True])
def test_a_capture_on_another_device_leaves_the_current_one(breaks: bool) -> None:
    assert torch.cuda.current_device() == 0
    device = torch.device("cuda", 1)
    switch = {"on": breaks}
    step = make_step(while_it_is_on(leaves_a_stream_unjoined, switch), device=device)
    for index in range(5):
        with pytest.raises(CaptureError) if breaks and index == 3 else nullcontext():
            step(batch().to(device))
        switch["on"] = switch["on"] and index < 3
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    step.close()
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("is_watched", [False], indirect=True)
def test_without_the_watcher_the_driver_says_that_a_stream_was_not_joined(is_watched: bool) -> None:
    step, error = fails_once(leaves_a_stream_unjoined, CaptureError, "joined")
    assert isinstance(error, CaptureError)
    assert error.cuda_error == 904
    assert step.report().num_ops == 0
    step.close()


def test_graphs_of_one_step_share_a_pool_and_a_pool_that_all_have_left_is_not_used_again() -> None:
    others = private_pools()
    step = make_step(on_change="recapture", max_graphs=2)
    for rows in (12, 6, 12, 6):
        call(step, 5, rows)
    assert step.report().num_captures == 2
    assert len(private_pools() - others) == 1
    step.evaluate(batch())
    for rows in (3, 4, 5):  # older graphs go
        call(step, 3, rows)
    step.close()


def test_a_replay_writes_no_memory_that_others_may_have_got() -> None:
    """Other captures of the process drop cuBLAS's workspaces: torch.compile's do."""

    def losses(*, drops: bool) -> list[Tensor]:
        step = make_step()
        generator = torch.Generator().manual_seed(3)
        found = []
        for index in range(7):
            found.append(step(torch.randn(12, WIDTH, generator=generator).to(CUDA)))
            if drops and index > 3:
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()
        step.close()
        return found

    expected, got = losses(drops=False), losses(drops=True)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_closing_after_an_error_of_the_device_still_frees_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = private_pools()
    step = make_step(num_calls=5)

    def fail(device: object = None) -> None:
        raise torch.AcceleratorError("CUDA error: operation failed due to a previous error")

    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_cuda_synchronize", fail)
        step.close()
    assert not private_pools() - others


@pytest.mark.parametrize("is_granted", [True, False])
def test_attempts_use_the_same_page_locked_memory(
    is_granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or memory of the other kind where the system grants none of this."""
    monkeypatch.setattr(host_copies, "_CHUNK_BYTES", 64)
    make = torch.empty

    def empty(*args: Any, **options: Any) -> Tensor:
        if options.get("pin_memory") and not is_granted:
            raise RuntimeError("CUDA error: out of memory")
        made: Tensor = make(*args, **options)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    state = [torch.arange(n, dtype=torch.float32, device="cuda") for n in (5, 0, 50, 16)]
    before, memory, places = [each.clone() for each in state], PinnedMemory(), set()
    for _ in range(3):
        copies = HostCopies([*state, state[2][3:]], memory)
        inner = HostCopies(state[:1], PinnedMemory())
        places.add(tuple(sorted(chunk.data_ptr() for chunk in copies._chunks)))
        assert len(copies._chunks) == -(-71 * 4 // 64)
        assert {chunk.is_pinned() for chunk in copies._chunks} == {is_granted}
        for each in state:
            each.add_(1)
        inner.roll_back()
        copies.roll_back()
        assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
        del copies
    assert len(places) == 1
    memory.end()
    assert memory.take(64)[0].is_pinned() == is_granted
