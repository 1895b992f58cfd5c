"""The CUDA backend, and that CUDA refuses what the rules refuse."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from cuda_stand_in import library
from cuda_stand_in.orders import chosen
from cuda_twin import CODES, CONTROLS, REFUSED, UNSEEN, tell
from forked_programs import forked
from graphfsdp.optim import FusedAdam
from helpers import no_host_sync
from make_step import make_step
from zoo import ZOO
from zoo_models import gpt

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
Results = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def twins() -> Results:
    """Run every program in a process of its own, some at a time."""
    wanted = [("without_rules", name) for name in (*REFUSED, *CONTROLS)]
    wanted += [("with_capture", name) for name in UNSEEN]

    def run_one(arguments: tuple[str, str]) -> dict[str, Any]:
        with forked(tell, *arguments) as process:
            done = process.ended()
        found: dict[str, Any] = {"crash": f"{done.returncode}: {done.stderr}"}
        return found if done.returncode else json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return dict(zip(wanted, pool.map(run_one, wanted), strict=True))


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("name", REFUSED)
def test_the_driver_refuses_what_the_rules_refuse(name: str, twins: Results) -> None:
    """So the rules cannot drift: without them, torch.cuda.graph fails on the same program."""
    result = twins["without_rules", name]
    assert "crash" not in result, result["crash"]
    assert result["errors"], "CUDA captured it"
    text = " ".join(result["errors"])
    assert "captur" in text.lower(), text


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("name", CONTROLS)
def test_the_driver_captures_what_the_rules_allow(name: str, twins: Results) -> None:
    result = twins["without_rules", name]
    assert "crash" not in result, result["crash"]
    assert result["errors"] == []


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("name", UNSEEN)
def test_errors_of_the_driver_are_explained_and_rolled_back(name: str, twins: Results) -> None:
    result = twins["with_capture", name]
    assert "crash" not in result, result["crash"]
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
