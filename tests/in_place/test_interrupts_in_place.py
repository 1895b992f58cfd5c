"""Ctrl-C anywhere in an iteration that is captured in place: none of it, or all, and on it goes."""

import os

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from helpers import assert_same_state, snapshot
from interrupting import InterruptAt, batch

NUM_TRIED = int(os.environ.get("GRAPHFSDP_INTERRUPTS", "40"))
NUM_MORE = 7


class Loop:
    """A loop as it is written."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def train(self, index: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(batch(index)), batch(index)[:, :1])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def state(self) -> dict[str, Tensor]:
        found = snapshot(self.model, self.optimizer)
        return {name: value for name, value in found.items() if not name.startswith("grad")}


def states(num: int) -> list[dict[str, Tensor]]:
    loop = Loop()
    found = [loop.state()]
    for index in range(num):
        loop.train(index)
        found.append(loop.state())
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "num_before", [0, 1, 3, 6], ids=["written", "made", "captured", "replayed"]
)
def test_an_iteration_that_is_interrupted_anywhere_is_whole_or_none(num_before: int) -> None:
    expected = states(num_before + NUM_MORE)
    clip, end_autocast = nn.utils.clip_grad_norm_, torch.clear_autocast_cache
    places = list[int]()
    indices: list[int | None] = [None, None]  # the first one fills caches
    while indices:
        index, loop, error = indices.pop(), Loop(), None
        counting = InterruptAt(index)
        with graphfsdp.capture_in_place(loop.model, loop.optimizer, warmup_steps=2, whole=True):
            for before in range(num_before):
                loop.train(before)
            try:
                with counting:
                    loop.train(num_before)
            except KeyboardInterrupt as raised:
                error, now = raised, loop.state()  # as a script saves it
            else:
                now = loop.state()
            when = f"{counting.fired} {index}"
            assert (error is not None) == (counting.fired != ""), when
            num_done = num_before + (error is None or not same(now, expected[num_before]))
            assert_same_state(expected[num_done], now, when)
            for more in range(num_done, len(expected) - 1):
                loop.train(more)
                assert_same_state(expected[more + 1], loop.state(), f"{when}: {more}")
        assert torch._C._len_torch_function_stack() == 0, when
        assert torch._C._len_torch_dispatch_stack() == 0, when
        assert nn.utils.clip_grad_norm_ is clip, when
        assert torch.clear_autocast_cache is end_autocast, when
        if not indices and not places:
            places = sorted(
                times[i % len(times)] for i, times in enumerate(counting.places.values())
            )
            indices = [*places[:: max(1, 4 * len(places) // NUM_TRIED)]]
