"""What the stand-in promises by itself: it names what it does not play, and it finds races."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphfsdp
from cuda_stand_in import library
from cuda_stand_in.orders import NUM_ORDERS, chosen
from graphfsdp.optim import FusedAdam

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not library.is_below(), reason="needs the stand-in: make cuda-test"),
]

CUDA = torch.device("cuda", 0)
COMPILED_TESTS = Path(__file__).parents[1] / "capture" / "test_compiled.py"


def test_a_function_that_is_not_played_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        torch.linalg.cholesky(torch.eye(3, device=CUDA))
    assert "cusolverDnCreate is not played" in capfd.readouterr().err


def lonely_kernel(x: "Tensor") -> None:  # quoted, or Triton looks the name up
    """Belong to no operator."""


def test_a_kernel_that_nobody_computes_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    triton = pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="not supported"):
        triton.jit(lonely_kernel)[(1,)](torch.empty(1, device=CUDA))
    assert "nobody computes the kernel lonely_kernel" in capfd.readouterr().err


def test_more_memory_than_a_device_has_is_refused() -> None:
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaMemGetInfo(0)[1]) > 0
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(1 << 45, dtype=torch.uint8, device=CUDA)


def test_what_an_operator_draws_follows_from_the_generator() -> None:
    torch.cuda.manual_seed(5)
    first = [torch.rand(7, device=CUDA) for _ in range(2)]
    torch.cuda.manual_seed(5)
    again = [torch.rand(7, device=CUDA) for _ in range(2)]
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_what_is_computed_in_float64_is_what_a_cpu_computes() -> None:
    """Its norms, and FusedAdam as tensor code, which copies by the driver."""

    def trained(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)).double()
        optimizer = FusedAdam(model.to(device).parameters(), lr=0.02)

        def loss_fn(model: torch.nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x).tanh().sum()
            return loss

        with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, skip_nonfinite=True) as step:
            for index in range(6):
                generator = torch.Generator().manual_seed(index)
                step(torch.randn(6, 4, generator=generator).double().to(device))
        return [param.detach().cpu() for param in model.parameters()]

    for got, expected in zip(trained(CUDA), trained(torch.device("cpu")), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


COMPILED = """
import torch
import graphfsdp
from graphfsdp._capture.cuda.recorder import find_driver
from graphfsdp.optim import FusedAdam

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).relu().square().mean()

model = Model().cuda()
model.compile()
with graphfsdp.capture(model, FusedAdam(model.parameters())) as step:
    for _ in range(5):
        step(torch.randn(12, 8).cuda())
    runner = step._runner
    driver, graph = find_driver(), runner._recordings.latest.graph._graph.raw_cuda_graph()
    print(*map(driver.name, driver.nodes(graph)))
"""


def run_alone(*arguments: str) -> str:
    """Run Python where kernels compute nothing: Inductor's belong to no operator."""
    environment = {**os.environ, "CUDA_STAND_IN_KERNELS": "none"}
    # A pool of processes that compile may wait for ever for one of them when its program ends.
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    command = [sys.executable, *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.time_limit(300)
def test_inductors_kernels_are_nodes_of_the_graph() -> None:
    assert "triton_" in run_alone("-c", COMPILED)


@pytest.mark.time_limit(300)
def test_what_inductor_says_fails_no_test_for_a_gpu() -> None:
    """It warns, of a GPU's speed for one, and no other test above the stand-in has it compile."""
    options = ["-q", "-k", "inductor and model", "-p", "no:cacheprovider"]
    assert "1 passed" in run_alone("-m", "pytest", *options, str(COMPILED_TESTS))


COPIES = """
import resource, torch
host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
on_device = torch.empty_like(host, device="cuda")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
host.copy_(on_device, non_blocking=True)
on_device.copy_(host)
assert torch.full((4,), 3.0).cuda().tolist() == [3.0] * 4
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_where_kernels_compute_nothing_large_copies_touch_no_memory() -> None:
    assert int(run_alone("-c", COPIES)) < 100_000  # KiB


class Forked:
    """Two halves of a sum on two streams; what makes them one may be left out."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits
        self.side = torch.cuda.Stream()
        self.parts = torch.zeros(2, 64, device=CUDA)
        self.out = torch.zeros(64, device=CUDA)
        self.noise = torch.zeros(64, device=CUDA)

    def run(self, x: Tensor) -> None:
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            torch.mul(x, 3.0, out=self.parts[0])
        torch.mul(x, 5.0, out=self.parts[1])
        if self.waits:
            main.wait_stream(self.side)
        torch.add(self.parts[0], self.parts[1], out=self.out)
        if not self.waits:  # a capture must end joined, which is too late for the sum
            torch.mul(x, 2.0, out=self.noise)
            main.wait_stream(self.side)


def captured(forked: Forked, x: Tensor) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forked.run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        forked.run(x)
    return graph.replay


def wrong_sums(forked: Forked, x: Tensor, run: Callable[[], None]) -> int:
    """Count the runs, each on other numbers, that do not give eight times x."""
    count = 0
    for index in range(NUM_ORDERS):
        x.fill_(float(index + 1))
        torch.cuda.synchronize()
        run()
        torch.cuda.synchronize()
        count += not torch.equal(forked.out, x * 8)
    return count


@pytest.mark.parametrize("waits", [True, False])
def test_a_graph_runs_in_every_order_that_its_nodes_allow(waits: bool) -> None:
    x = torch.zeros(64, device=CUDA)
    forked = Forked(waits=waits)
    replay = captured(forked, x)
    races = library.take_races()
    with chosen(order=1):
        wrong = wrong_sums(forked, x, replay)
    if waits:
        assert wrong == 0
        assert races == ""
    else:
        assert 0 < wrong < NUM_ORDERS
        assert "aten.mul.out" in races
        assert "aten.add.out" in races
        assert races.count("neither waits for the other") == 1


@pytest.mark.parametrize("waits", [True, False])
def test_streams_interleave_in_every_way_that_their_events_allow(waits: bool) -> None:
    x = torch.zeros(64, device=CUDA)
    forked = Forked(waits=waits)
    with chosen(streams=1):
        wrong = wrong_sums(forked, x, lambda: forked.run(x))
    assert wrong == 0 if waits else 0 < wrong < NUM_ORDERS


def test_a_device_that_is_waited_for_is_the_current_one_alone() -> None:
    other = torch.device("cuda", 1)
    count = torch.zeros(64, device=other)
    unfinished = 0
    with chosen(streams=1):
        for _ in range(NUM_ORDERS):
            for _ in range(8):
                count += 1
            torch.cuda.synchronize()
            unfinished += not torch.cuda.current_stream(other).query()
        assert unfinished > 0
        torch.cuda.synchronize(other)
        assert torch.cuda.current_stream(other).query()
    assert float(count[0]) == 8 * NUM_ORDERS
