"""Memory that FusedAdam needs while it runs: the program's own in a replay, and little of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
from graphfsdp._capture.cpu import graph as cpu_graph
from graphfsdp._capture.cpu.recorder import Recorder
from graphfsdp._capture.trace.op_digests import OpDigests
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused.step import fused_adam_
from recording import record
from zoo_models import Squared

WIDTH = 256


def clipped_step(num_layers: int = 4) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = Squared(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    return graphfsdp.capture(model, optimizer, max_grad_norm=1e-3), model


def largest_allocation(run: Callable[[], object]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    results = profile.profiler.kineto_results
    return max(int(event.nbytes()) for event in results.events() if event.name() == "[memory]")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_replay_that_clips_allocates_nothing_for_its_gradients() -> None:
    step, model = clipped_step()
    x = torch.randn(8, WIDTH)
    num_bytes = sum(4 * param.numel() for param in model.parameters())
    eager = largest_allocation(lambda: step(x))
    assert num_bytes / 4 <= eager, "the measurement sees nothing"
    for _ in range(4):
        step(x)
    assert largest_allocation(lambda: step(x)) < num_bytes / 64
    # It lies where activations were, or else is the only thing there.
    assert step.report().pool_bytes <= num_bytes


def test_scratch_memory_is_none_of_the_results_of_an_operator() -> None:
    digests = []
    for memory in (None, torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)):
        weight, *moments = (torch.full((4,), 0.5) for _ in range(3))
        grads = [torch.ones(4)]
        hyper = torch.tensor([[0.1, 0.9, 0.99, 1e-8, 0.0]], dtype=torch.float64)
        columns = ([weight], grads, *([moment] for moment in moments), [], [], [], [], [])
        lanes = ([0], [1], [0])
        with OpDigests() as seen:
            fused_adam_(
                *columns, [torch.zeros(1)], hyper, *lanes, torch.tensor(0.5), None, None, [],
                memory, 64, True, True, True, False, "adam", False,
            )  # fmt: skip
        digests.append([call for call in seen.calls if call.name == "fused_adam"])
    assert len(digests[0]) == 1
    assert digests[0] == digests[1] == digests[2]


def test_a_recording_is_freed_with_its_last_use_and_not_by_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[str] = []

    class Watched(Recorder):
        def __del__(self) -> None:
            freed.append("recorder")

    monkeypatch.setattr(cpu_graph, "Recorder", Watched)
    trimmed: list[int] = []

    def noting_trim() -> None:
        trimmed.append(len(freed))

    monkeypatch.setattr(cpu_graph, "give_back_freed_pages", noting_trim)
    x = torch.ones(8)
    graph, _ = record(lambda: [x.sin().cos()])
    assert trimmed[-1] == 1, "its pages are given back while it is still there"
    assert torch.equal(graph.replay()[0], x.sin().cos())
