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
from forked_programs import forked
from helpers import assert_same_state, quick_garbage_collection, same_bits, snapshot

NUM_CALLS = 10_000
NUM_SETTLED = 1_000  # the first calls may fill caches
NUM_UNTRACED = 8_000  # tracing every allocation is slow


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
    lr = torch.tensor(1e-2)
    optim = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)
    batches = torch.randn(64, 3, 6)
    losses = []
    num_objects = num_resident = num_traced = 0
    with graphfsdp.capture(model, optim, scope=scope) as step:
        for index in range(NUM_CALLS):
            if measures and index == NUM_SETTLED:
                num_objects, num_resident = _num_objects(), _resident_bytes()
            if measures and index == NUM_UNTRACED:
                tracemalloc.start()
                num_traced = tracemalloc.get_traced_memory()[0]
            lr.fill_(1e-2 / (1 + index % 7))
            loss = step(batches[index % 64])
            if index % 500 == 0:
                losses.append(loss)
        if measures:
            gc.collect()  # torch's pytrees leave cycles, which come and go
            # The losses that are kept are some dozen objects.
            assert tracemalloc.get_traced_memory()[0] - num_traced < 20_000
            assert _num_objects() - num_objects < 200
            assert _resident_bytes() - num_resident < 4 * 2**20
    return snapshot(model, optim), losses


def _num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def check() -> None:
    try:
        got, losses = train("full_iteration", measures=True)
    finally:
        tracemalloc.stop()
    expected, eager_losses = train("none", measures=False)
    assert_same_state(expected, got)
    for left, right in zip(eager_losses, losses, strict=True):
        assert same_bits(left, right)
    assert len({float(loss) for loss in losses}) == len(losses)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_ten_thousand_replays_neither_grow_nor_drift() -> None:
    """In a process of its own: what the runner of the tests receives meanwhile is memory, too."""
    with forked(check) as process:
        done = process.ended()
    assert done.returncode == 0, done.stderr
