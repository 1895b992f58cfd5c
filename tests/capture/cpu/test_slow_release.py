"""Tests of memory that another thread still holds when a recording ends."""

import threading

import pytest
import torch
from torch import Tensor

from cpu_recording import record


@pytest.mark.parametrize(("held_s", "patience_s", "num_escapes"), [(0.02, 20, 0), (None, 0.1, 1)])
def test_what_a_worker_thread_soon_lets_go_is_no_escape(
    held_s: float | None, patience_s: float, num_escapes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gloo's threads do with the buffers of a collective."""
    monkeypatch.setattr("graphfsdp._capture.cpu.graph._RELEASE_S", patience_s)
    threads: list[threading.Thread] = []
    is_over = threading.Event()

    def keep(tensor: Tensor) -> None:
        is_over.wait(held_s)
        del tensor

    def lend(tensor: Tensor) -> None:
        tensor.fill_(2.0)
        alias = tensor.detach()  # an object of its own; the argument dies with the call
        threads.append(threading.Thread(target=keep, args=(alias,)))
        threads[-1].start()

    weight = torch.ones(4)

    def iterate() -> list[Tensor]:
        buffer = torch.empty(4)
        torch.ops.graphfsdp_lending.lend_(buffer)
        return [buffer * weight]

    with torch.library._scoped_library("graphfsdp_lending", "DEF") as library:
        library.define("lend_(Tensor(a!) tensor) -> ()")
        library.impl("lend_", lend, "CPU")
        graph, results = record(iterate)
        weight.fill_(3.0)
        replayed = graph.replay()[0]
    is_over.set()
    for thread in threads:
        thread.join()
    assert graph.facts.num_escapes == num_escapes
    assert torch.equal(results[0], torch.full((4,), 2.0))
    assert torch.equal(replayed, torch.full((4,), 6.0))
