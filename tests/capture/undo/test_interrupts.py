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
from torch.utils._python_dispatch import TorchDispatchMode

import graphfsdp
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam


class SignalError(Exception):
    """Raised by a handler."""


RAISING = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """Handlers that raise, for several signals; the list says which were called."""
    called: list[int] = []

    def raise_error(number: int, frame: FrameType | None) -> None:
        called.append(number)
        raise SignalError(signal.Signals(number).name)

    previous = {number: signal.signal(number, raise_error) for number in RAISING}
    yield called
    for number, handler in previous.items():
        signal.signal(number, handler)


@contextmanager
def handling(number: signal.Signals, told: list[int]) -> Iterator[None]:
    """Note a signal in the body."""
    previous = signal.signal(number, lambda number, frame: told.append(number))
    try:
        yield
    finally:
        signal.signal(number, previous)


class SignalAt(TorchDispatchMode):
    """Sends this process signals while an operator runs."""

    def __init__(self, index: int, *numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index = index
        self._numbers = numbers
        self.names: list[str] = []  # of operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        if len(self.names) == self._index + 1:
            for number in self._numbers:
                os.kill(os.getpid(), number)
        return func(*args, **(kwargs or {}))


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

    with handling(signal.SIGUSR1, told), Listening(3, signal.SIGUSR1):
        step(torch.randn(2, 3))
    assert seen[:4] == [0, 0, 0, 0]
    assert seen[4:] == [1] * (len(seen) - 4)
    assert step.phase is Phase.REPLAY


def test_all_signals_are_delivered_although_each_handler_raises(handlers: list[int]) -> None:
    step = replaying()
    # As in the kernel, a waiting signal is one signal.
    with pytest.raises(SignalError, match="SIGTERM"), SignalAt(3, *RAISING, *RAISING):
        step(torch.randn(2, 3))
    assert handlers == [int(number) for number in RAISING]
    assert step.phase is Phase.REPLAY  # which is complete, not torn
    for number in RAISING:  # all are handled as before
        with pytest.raises(SignalError):
            signal.raise_signal(number)


def test_an_error_comes_first_and_a_handler_that_returns_does_not_hide_it() -> None:
    step = replaying()
    told: list[int] = []

    class Failing(SignalAt):
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            result = super().__torch_dispatch__(*args, **kwargs)
            if len(self.names) == 4:
                assert not told
                raise KeyError
            return result

    with handling(signal.SIGTERM, told), pytest.raises(KeyError), Failing(3, signal.SIGTERM):
        step(torch.randn(2, 3))
    assert told == [signal.SIGTERM]


def test_a_signal_in_an_operator_of_a_warm_up_is_delivered_in_it() -> None:
    """And another kind of signal as well, each once."""
    step, told = started(), list[int]()
    for counting in (SignalAt(-1), SignalAt(-1)):  # the first call makes more
        with counting:
            step(torch.randn(2, 3))
    index = next(at for at, name in enumerate(counting.names) if "addmm" in name)
    mode = SignalAt(index, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    with handling(signal.SIGTERM, told), pytest.raises(KeyboardInterrupt), mode:
        step(torch.randn(2, 3))
    assert told == [signal.SIGTERM]
    assert sum("addmm" in name for name in mode.names) == 1  # of two
    step(torch.randn(2, 3))
