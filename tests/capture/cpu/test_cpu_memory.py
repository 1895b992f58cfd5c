"""Memory of the CPU backend: nothing is held longer than an eager iteration holds it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import graphfsdp
from graphfsdp.optim import FusedAdam
from recording import record
from zoo_models import WIDTH, Squared

NUM_PROBED = 200  # several parts of a program
PROBED: list[StorageWeakRef] = []
ALIVE: list[int] = []


@torch.library.custom_op("graphfsdp_tests::probe", mutates_args=())
def probe(x: Tensor) -> Tensor:
    """Copy x; note how many results of this operator are alive."""
    result = x.clone()
    PROBED.append(StorageWeakRef(result.untyped_storage()))
    ALIVE.append(sum(not ref.expired() for ref in PROBED))
    return result


@probe.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _probe_backward(ctx: Any, grad: Tensor) -> Tensor:
    copy: Tensor = probe(grad)
    return copy


probe.register_autograd(_probe_backward)


@contextmanager
def watched_lifetimes() -> Iterator[None]:
    PROBED.clear()
    ALIVE.clear()
    yield


def num_alive() -> int:
    return sum(not ref.expired() for ref in PROBED)


def test_intermediates_are_freed_after_their_last_use() -> None:
    x = torch.ones(8)

    def iterate() -> list[Tensor]:
        h = x
        for _ in range(NUM_PROBED):
            h = probe(h)
        return [h]

    with watched_lifetimes():
        graph, results = record(iterate)
        del results
        gc.collect()
        assert num_alive() == 0, "the recording holds intermediates"
    for _ in range(3):
        with watched_lifetimes():
            results = graph.replay()
            assert max(ALIVE) <= 2
            assert len(ALIVE) == NUM_PROBED
            assert num_alive() == 1
            del results
            assert num_alive() == 0


def test_a_captured_step_holds_no_activation_between_calls() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = probe(layer(x).tanh()).sin()
            return x.mean()

    model = Chain()
    step = graphfsdp.capture(model, FusedAdam(model.parameters()))
    x = torch.randn(4, WIDTH)
    peaks = []
    for _ in range(7):
        with watched_lifetimes():
            loss = step(x)
            gc.collect()
            assert num_alive() == 0
            peaks.append(max(ALIVE))
    assert peaks[4:] == [peaks[0]] * 3, "a replay keeps more activations alive than eager"
    assert loss.isfinite()


def peak_bytes(run_once: Callable[[], object]) -> int:
    """Return the largest number of bytes that were allocated at a time, beyond the start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run_once()
    results = profile.profiler.kineto_results
    level = peak = 0
    events = [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_replay_needs_no_more_memory_than_eager(microbatches: int) -> None:
    peaks = {}
    for scope in ("none", "full_iteration"):
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
        model = Squared(*layers, nn.Dropout(0.1))
        step = graphfsdp.capture(
            model, FusedAdam(model.parameters()), scope=scope, microbatches=microbatches
        )
        x = torch.randn(512, 64)
        for _ in range(5):
            step(x)
        peaks[scope] = peak_bytes(lambda step=step, x=x: step(x))  # type: ignore[misc]
        peaks[scope] += step.report().pool_bytes
    activation = 512 * 64 * 4 // microbatches
    assert peaks["none"] > 8 * activation, "the measurement sees nothing"
    assert peaks["full_iteration"] <= 1.02 * peaks["none"], peaks
