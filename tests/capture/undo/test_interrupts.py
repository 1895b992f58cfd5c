"""Ctrl-C and SIGTERM wait until a replay is over; other signals are handled at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
from faults_at_operators import Fault, FaultMode
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam
from helpers import OpNames


class SignalError(Exception):
    """Raised by a handler."""


@contextmanager
def handling(told: list[int], *numbers: int, raises: bool = False) -> Iterator[None]:
    """Note signals in the body."""

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if raises:
            raise SignalError(signal.Signals(number).name)

    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class SignalAt(FaultMode):
    """Sends this process signals while an operator runs."""

    def __init__(self, index: int, *numbers: int) -> None:
        super().__init__(index, Fault.INTERRUPT, after=False)
        self._numbers = numbers

    def _fire(self, name: str) -> None:
        self.fired = name
        for number in self._numbers:
            os.kill(os.getpid(), number)


def started() -> graphfsdp.CapturedStep:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    return graphfsdp.capture(model, optimizer, loss_fn=lambda model, x: model(x).sum())


def replaying() -> graphfsdp.CapturedStep:
    step = started()
    for _ in range(5):
        step(torch.randn(2, 3))
    return step


def test_a_handler_of_another_signal_runs_in_the_middle_of_a_replay() -> None:
    step = replaying()
    told: list[int] = []
    seen: list[int] = []

    class Listening(SignalAt):
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(len(told))
            return super().__torch_dispatch__(*args, **kwargs)

    with handling(told, signal.SIGUSR1), Listening(3, signal.SIGUSR1):
        step(torch.randn(2, 3))
    assert seen[:4] == [0, 0, 0, 0]
    assert seen[4:] == [1] * (len(seen) - 4)
    assert step.phase is Phase.REPLAY


def test_all_signals_are_delivered_although_each_handler_raises() -> None:
    step, told = replaying(), list[int]()
    both = (signal.SIGINT, signal.SIGTERM)
    with handling(told, *both, raises=True):
        # As in the kernel, a waiting signal is one signal.
        with pytest.raises(SignalError, match="SIGTERM"), SignalAt(3, *both, *both):
            step(torch.randn(2, 3))
        assert told == [*both]
        assert step.phase is Phase.REPLAY  # which is complete, not torn
        for number in both:  # all are handled as before
            with pytest.raises(SignalError):
                signal.raise_signal(number)


def test_an_error_comes_first_and_a_handler_that_returns_does_not_hide_it() -> None:
    step = replaying()
    told: list[int] = []

    class Failing(SignalAt):
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            result = super().__torch_dispatch__(*args, **kwargs)
            if self.num_ops == 4:
                assert not told
                raise KeyError
            return result

    with handling(told, signal.SIGTERM), pytest.raises(KeyError), Failing(3, signal.SIGTERM):
        step(torch.randn(2, 3))
    assert told == [signal.SIGTERM]


def test_a_signal_in_an_operator_of_a_warm_up_is_delivered_in_it() -> None:
    """And another kind of signal as well, each once."""
    step, told = started(), list[int]()
    for counting in (OpNames(), OpNames()):  # the first call makes more
        with counting:
            step(torch.randn(2, 3))
    index = next(at for at, name in enumerate(counting.names) if "addmm" in name)
    seen, mode = OpNames(), SignalAt(index, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    with handling(told, signal.SIGTERM), pytest.raises(KeyboardInterrupt), mode, seen:
        step(torch.randn(2, 3))
    assert told == [signal.SIGTERM]
    assert sum("addmm" in name for name in seen.names) == 1  # of two
    step(torch.randn(2, 3))
