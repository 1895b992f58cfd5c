"""Random orders: of the nodes of a graph, and of the entries of streams."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cuda_stand_in import library
from graphfsdp import CapturedStep
from helpers import same_bits

NUM_ORDERS = 50


@contextlib.contextmanager
def chosen(**seeds: int) -> Iterator[None]:
    library.choose(**seeds)
    try:
        yield
    finally:
        library.choose()


def assert_any_order(step: CapturedStep, seed: int = 1, num_orders: int = NUM_ORDERS) -> None:
    """Launch a captured step in random orders, each from the same state, and compare bit for bit.

    With the launch in the order of the capture, which other tests compare with eager iterations.
    On several ranks, which all call it, each has its own orders.
    """
    runner: Any = step._runner
    graph = runner._recordings.latest.graph
    memory = [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for storage in {
            storage.data_ptr(): storage
            for storage in graph._external
            if isinstance(storage, torch.UntypedStorage) and storage.device.type == "cuda"
        }.values()
    ]
    before, generator = [each.clone() for each in memory], torch.cuda.get_rng_state()

    def launched() -> list[Tensor]:
        torch._foreach_copy_(memory, before)
        torch.cuda.set_rng_state(generator)
        results: list[Tensor] = graph.replay()
        torch.cuda.synchronize()
        return results

    expected, after = launched(), [each.clone() for each in memory]
    changed = sum(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert changed, "a training iteration changes something"
    with chosen(order=seed):
        for number in range(num_orders):
            got = launched()
            pairs = zip([*expected, *after], [*got, *memory], strict=True)
            different = [index for index, (a, b) in enumerate(pairs) if not same_bits(a, b)]
            assert not different, (
                f"order {number} of seed {seed}: of {len(got)} results and {len(memory)} storages "
                f"these differ: {different}"
            )
