"""Ten thousand replays: no memory grows, and the last bit is that of as many eager iterations."""

import gc
import os
import pathlib
import sys
import tracemalloc

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, quick_garbage_collection, same_bits, snapshot

NUM_CALLS = 10_000
NUM_SETTLED = 1_000  # the first calls may fill caches


class Net(nn.Module):
    """A weight, randomness, and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.average, Tensor)
        h = x * self.weight + 0.1 * torch.rand_like(x)
        with torch.no_grad():
            self.average.lerp_(h.mean(dim=0), 0.01)
        return (h - self.average).square().mean()


def _resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def train(scope: str, *, measures: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Train for all calls; batch and learning rate change; compare memory early and late."""
    quick_garbage_collection()
    torch.manual_seed(0)
    model = Net()
    optim = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    batches = torch.randn(64, 3, 6)
    losses = []
    at_start = (0, 0, 0)
    with graphfsdp.capture(model, optim, scope=scope) as step:
        for index in range(NUM_CALLS):
            if measures and index == NUM_SETTLED:
                at_start = _memory()
            optim.param_groups[0]["lr"] = 1e-2 / (1 + index % 7)
            loss = step(batches[index % 64])
            if index % 500 == 0:
                losses.append(loss)
        if measures:
            num_objects, num_traced, num_resident = _memory()
            # The losses that are kept are some dozen objects.
            assert num_objects - at_start[0] < 200
            assert num_traced - at_start[1] < 50_000
            assert num_resident - at_start[2] < 4 * 2**20
    return snapshot(model, optim), losses


def _memory() -> tuple[int, int, int]:
    gc.collect()
    return len(gc.get_objects()), tracemalloc.get_traced_memory()[0], _resident_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_ten_thousand_replays_neither_grow_nor_drift() -> None:
    tracemalloc.start()
    try:
        got, losses = train("full_iteration", measures=True)
    finally:
        tracemalloc.stop()
    expected, eager_losses = train("none", measures=False)
    assert_same_state(expected, got)
    for left, right in zip(eager_losses, losses, strict=True):
        assert same_bits(left, right)
    assert len({float(loss) for loss in losses}) == len(losses)
