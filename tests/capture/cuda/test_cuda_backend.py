"""The CUDA backend on a played device: what its Python does, in which order, and after errors."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
import graphfsdp
from fake_cuda import (
    DEVICE,
    FakeCuda,
    batch,
    leaves_a_stream_unjoined,
    make_step,
    use_cuda_backend,
)
from fake_libcuda import FakeLibcuda
from graphfsdp import CaptureError, Phase
from graphfsdp._capture.cuda import driver as cuda_driver
from graphfsdp.optim import FusedAdam
from helpers import Case, Trace, assert_same_run, run
from zoo import ZOO
from zoo_models import WIDTH, Squared

CPU = torch.device("cpu")
LossFn = Callable[..., Tensor]


@pytest.fixture
def driver(played_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeLibcuda:
    return play_driver(FakeLibcuda(played_cuda), monkeypatch)


def play_driver(library: FakeLibcuda, monkeypatch: pytest.MonkeyPatch) -> FakeLibcuda:
    def load(name: str) -> Any:
        if name != "libcuda.so.1":
            raise OSError(name)
        return library

    monkeypatch.setattr("graphfsdp._capture.cuda.driver.ctypes.CDLL", load)
    return library


def run_on(
    played_cuda: FakeCuda, case: Case, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Trace:
    with monkeypatch.context() as patch, fake_cuda.running(played_cuda):
        use_cuda_backend(patch)
        return run(case, "full_iteration", CPU, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt", {"max_grad_norm": 1.0}),
        ("conv_net", {"microbatches": 2, "skip_nonfinite": True}),
        ("keywords", {"optimizer": "sgd"}),
    ],
)
def test_replays_are_what_eager_iterations_are(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured tensors hold NaN until the first launch: nobody may read one before."""
    options["num_steps"] = 9
    expected = run(ZOO[name], "none", CPU, **options)
    cuda = fake_cuda.install(monkeypatch)
    got = run_on(cuda, ZOO[name], monkeypatch, **options)
    assert_same_run(expected, got)
    assert cuda.log.count("begin capture") == cuda.log.count("end capture") == 1
    assert cuda.log.count("launch") == len(got.outputs) - 3
    assert cuda.log[-2:] == ["synchronize", "reset"]
    assert cuda.stream == 0
    assert cuda.pools == dict.fromkeys(cuda.pools, 0)


def test_the_driver_names_nodes_and_the_report_counts_them(
    on_played_device: FakeCuda, driver: FakeLibcuda, tmp_path: Path
) -> None:
    with make_step() as step:
        for _ in range(5):
            step(batch())
        report = step.report()
        step.debug_dump(tmp_path / "graph.dot")
    assert (tmp_path / "graph.dot").read_text().startswith("digraph")
    assert report.num_nodes == len(on_played_device.nodes) > 10
    assert sum(sum(counts.values()) for counts in report.by_kind.values()) == report.num_nodes
    assert report.by_kind["kernel"]["addmm"] == 2
    assert "kernel addmm" in report.by_module["layers.0"]
    assert report.pool_bytes == 1 << 16, "what the allocator gave back before is not the pool's"
    report.html(tmp_path / "page.html")
    assert "addmm" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("without", [(), ("cuStreamGetCaptureInfo_v2",)])
def test_the_driver_is_asked_with_the_types_of_its_header(
    played_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]
) -> None:
    play_driver(FakeLibcuda(played_cuda, without), monkeypatch)
    driver = cuda_driver.CudaDriver()
    side, graph = torch.cuda.Stream(DEVICE), torch.cuda.CUDAGraph(keep_graph=True)
    assert driver.capturing_graph(side.cuda_stream) is None
    x = torch.ones(3)
    with (
        fake_cuda.running(played_cuda),
        torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
    ):
        x.mul_(2)
        assert driver.capturing_graph(side.cuda_stream) == fake_cuda.GRAPH_HANDLE
        assert driver.count(fake_cuda.GRAPH_HANDLE) == 1
    nodes = driver.nodes(graph.raw_cuda_graph())
    assert nodes is not None
    assert [driver.name(node) for node in nodes] == ["kernel mul_"]
    assert torch.equal(x, torch.ones(3)), "a capture runs nothing"
    graph.replay()
    assert torch.equal(x, torch.full((3,), 2.0))


def test_a_capture_that_the_driver_breaks_is_explained_undone_and_can_be_repeated(
    on_played_device: FakeCuda,
) -> None:
    """Torch leaves allocator and generators in the middle of it: random draws fail, and so does
    the next capture."""
    step = make_step()
    for _ in range(3):
        step(batch())
    before = [param.detach().clone() for param in step._runner._engine.model.parameters()]
    on_played_device.fail_in_capture = "aten::addmm"
    with pytest.raises(CaptureError, match="Remedy") as caught:
        step(batch())
    assert caught.value.cuda_error == 900
    assert caught.value.op == "aten.addmm.default"
    assert caught.value.module_path == "layers.0"
    for param, old in zip(step._runner._engine.model.parameters(), before, strict=True):
        assert torch.equal(param, old)
    assert on_played_device.stream == 0
    assert on_played_device.under_way == []
    torch.cuda.empty_cache()
    torch.rand(3)
    for _ in range(3):
        step(batch())
    assert step.phase is Phase.REPLAY
    step.close()
    assert set(on_played_device.pools.values()) <= {0, -1}


def test_without_the_watcher_the_driver_says_that_a_stream_was_not_joined(
    on_played_device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch.compile, which no watcher may see."""
    monkeypatch.setattr("graphfsdp._capture.cuda.graph.has_compiled_regions", lambda model: True)
    loose = {"on": True}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if loose["on"] and torch.cuda.is_current_stream_capturing():
            return leaves_a_stream_unjoined(model, x)
        loss: Tensor = model(x)
        return loss

    step = make_step(loss_fn)
    for _ in range(3):
        step(batch())
    with pytest.raises(CaptureError, match="joined") as caught:
        step(batch())
    assert caught.value.cuda_error == 904
    loose["on"] = False
    for _ in range(3):
        step(batch())
    assert step.phase is Phase.REPLAY
    assert step.report().num_ops == 0
    step.close()


def test_graphs_of_one_step_share_a_pool_and_a_pool_that_all_have_left_is_not_used_again(
    on_played_device: FakeCuda,
) -> None:
    step = make_step(on_change="recapture", max_graphs=2)
    for rows in (12, 6, 12, 6):
        for _ in range(5):
            step(batch(rows))
    used = {pool: count for pool, count in on_played_device.pools.items() if count > 0}
    assert list(used.values()) == [2]
    step.evaluate(batch())
    for rows in (3, 4, 5):  # older graphs go
        for _ in range(3):
            step(batch(rows))
    step.close()
    assert set(on_played_device.pools.values()) <= {0, -1}


def test_a_capture_on_made_up_data_and_evaluations_change_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def losses(**options: Any) -> list[Tensor]:
        step = make_step(**options)
        generator = torch.Generator().manual_seed(3)
        found = []
        for _ in range(6):
            found.append(step(torch.randn(12, WIDTH, generator=generator)))
            if options:
                step.evaluate(torch.ones(12, WIDTH))
        if options:
            step.verify(2)
        step.close()
        return found

    expected = losses()
    played = fake_cuda.install(monkeypatch)
    use_cuda_backend(monkeypatch)
    with fake_cuda.running(played):
        got = losses(example_batch=(torch.zeros(12, WIDTH),))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_an_iteration_of_ones_own_may_return_nothing(on_played_device: FakeCuda) -> None:
    model = Squared(nn.Linear(WIDTH, WIDTH))

    def iteration(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    optimizer = FusedAdam(model.parameters(), lr=0.01)
    with graphfsdp.capture(model, optimizer, iteration=iteration) as step:
        for _ in range(6):
            assert step(batch()) is None
        assert step.phase is Phase.REPLAY


def test_a_step_that_is_dropped_gives_its_pool_back(on_played_device: FakeCuda) -> None:
    step = make_step()
    for _ in range(5):
        step(batch())
    assert 1 in on_played_device.pools.values()
    del step
    gc.collect()
    assert set(on_played_device.pools.values()) <= {0, -1}


def test_closing_after_an_error_of_the_device_still_frees_the_graph(
    on_played_device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step()
    for _ in range(5):
        step(batch())

    def fail() -> None:
        raise fake_cuda.cuda_error(901)

    monkeypatch.setattr(torch._C, "_cuda_synchronize", fail)
    step.close()
    assert on_played_device.log[-1] == "reset"
