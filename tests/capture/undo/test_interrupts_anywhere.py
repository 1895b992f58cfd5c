"""Ctrl-C anywhere in a call of the step: nothing of it, or all of it, and training goes on."""

import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from faults_at_operators import Fault, FaultMode, World
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, snapshot
from time_limits import until
from zoo_models import Squared

# Of each kind of call; a call has thousands of places.
NUM_TRIED = int(os.environ.get("GRAPHFSDP_INTERRUPTS", "40"))

OURS = str(pathlib.Path(graphfsdp.__file__).parent)
# What our frames enter contexts by.
CONTEXTS = ("/contextlib.py", "/torch/utils/_python_dispatch.py", "/torch/overrides.py")
Place = tuple[tuple[CodeType, int], ...]  # instructions, of a context's frames and of ours


class InterruptAt:
    """Has the handler of SIGINT called before the n-th instruction of our frames.

    Python calls handlers at fewer places: where functions begin and loops go round, and behind
    calls of C.

    Attributes:
        places: For each instruction at which an interrupt can come, when it comes there.
    """

    def __init__(self, index: int | None = None) -> None:
        self._index = index
        self.places: dict[Place, list[int]] = {}
        self.num_passed = 0
        self.fired = ""

    def __enter__(self) -> "InterruptAt":
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._path_to_ours(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            if self._index is None:
                place = tuple((f.f_code, f.f_lasti) for f in self._path_to_ours(frame))
                self.places.setdefault(place, []).append(self.num_passed)
            elif self.num_passed == self._index:
                self.fired = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                handler: Any = signal.getsignal(signal.SIGINT)
                handler(signal.SIGINT, frame)
            self.num_passed += 1
        return self._on_event

    def _path_to_ours(self, frame: FrameType | None) -> list[FrameType]:
        path = []
        while frame is not None:
            path.append(frame)
            file = frame.f_code.co_filename
            if file.startswith(OURS):
                return path
            if not file.endswith(CONTEXTS):
                return []
            frame = frame.f_back
        return []


def net() -> nn.Module:
    """Return a model with what an iteration changes besides the weights."""
    return Squared(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 1))


class Interrupted:
    """A training that is interrupted anywhere, beside the same one that is not.

    Attributes:
        num_done: Iterations that have taken effect.
    """

    def __init__(self, num_iterations: int, **options: Any) -> None:
        self._expected = self._without_interrupts(num_iterations)
        self.model, self.optimizer = self._made()
        self.step = self.captured(**options)
        self.num_done = 0

    def _made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = net()
        return model, FusedAdam(model.parameters(), lr=0.05)

    def _without_interrupts(self, num_iterations: int) -> list[dict[str, Tensor]]:
        self.model, self.optimizer = self._made()
        step = self.captured(scope="none")
        expected = [self.state()]
        for index in range(num_iterations):
            step(batch(index))
            expected.append(self.state())
        step.close()
        return expected

    def captured(self, **options: Any) -> graphfsdp.CapturedStep:
        return graphfsdp.capture(self.model, self.optimizer, max_grad_norm=1.0, **options)

    def state(self) -> dict[str, Tensor]:
        return {
            name: value
            for name, value in snapshot(self.model, self.optimizer).items()
            if "grad of" not in name
        }

    def train(self) -> Tensor:
        loss: Tensor = self.step(batch(self.num_done))
        self.num_done += 1
        return loss

    def places(self, call: Callable[[], object]) -> dict[Place, list[int]]:
        """Return where an interrupt of a call can come, behind one that has filled caches."""
        for _ in range(2):
            with InterruptAt() as counting:
                call()
        self.check("counted")
        return counting.places

    def interrupt(self, call: Callable[[], object], index: int) -> str:
        """Interrupt a call, and look at everything; return where, "" if it ended before."""
        world = World(self.model, self.optimizer)
        handler, profile = signal.getsignal(signal.SIGINT), sys.getprofile()
        mode = InterruptAt(index)
        caught: KeyboardInterrupt | None = None
        try:
            with mode:
                call()
        except KeyboardInterrupt as error:
            caught = error  # with all frames, and what they hold
        assert (caught is not None) == bool(mode.fired), mode.fired
        assert signal.getsignal(signal.SIGINT) is handler, mode.fired
        assert sys.getprofile() is profile, mode.fired
        assert torch._C._len_torch_dispatch_stack() == 0, mode.fired
        assert torch._C._len_torch_function_stack() == 0, mode.fired
        if call == self.train and mode.fired and self._is_at(self.num_done + 1):
            self.num_done += 1
        elif mode.fired:
            world.assert_unchanged(mode.fired)
        self.check(mode.fired)
        return mode.fired

    def check(self, when: str) -> None:
        assert_same_state(self._expected[self.num_done], self.state(), when)

    def _is_at(self, index: int) -> bool:
        expected, state = self._expected[index], self.state()
        return list(expected) == list(state) and all(
            torch.equal(value, expected[name]) for name, value in state.items()
        )


def batch(index: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(index))


def chosen(places: dict[Place, list[int]], num: int = NUM_TRIED) -> Iterator[int]:
    """Of each place one instruction, another time of those at which the call gets there."""
    all_of_them = sorted(times[rank % len(times)] for rank, times in enumerate(places.values()))
    return iter(all_of_them[:: max(1, len(all_of_them) // num)])


def about_to_capture() -> Interrupted:
    training = Interrupted(4, warmup_steps=1)
    training.train()
    return training


def test_a_capture_that_is_interrupted_anywhere_leaves_nothing_or_all_of_it() -> None:
    about_to_capture().train()  # which fills caches
    counted, counting = about_to_capture(), InterruptAt()
    with counting:
        counted.train()
    training = counted
    num_interrupted = 0
    for index in chosen(counting.places, NUM_TRIED // 5):
        if training.num_done > 1:
            assert training.step.phase is Phase.REPLAY
            training.train()
            training.check("replayed")
            training.step.close()
            training = about_to_capture()
        num_interrupted += training.interrupt(training.train, index) != ""
    assert num_interrupted > NUM_TRIED / 10
    training.train()
    training.step.close()


def replaying(num_iterations: int) -> Interrupted:
    training = Interrupted(num_iterations, warmup_steps=1)
    for _ in range(3):
        training.train()
    assert training.step.phase is Phase.REPLAY
    return training


@pytest.mark.parametrize("replays", [False, True], ids=["warm-up", "replay"])
def test_an_iteration_that_is_interrupted_anywhere_leaves_nothing_or_all_of_it(
    replays: bool,
) -> None:
    num_iterations = 3 * NUM_TRIED
    training = (
        replaying(num_iterations)
        if replays
        else Interrupted(num_iterations, warmup_steps=num_iterations)
    )
    training.train()
    indices = [*chosen(training.places(training.train))]
    assert sum(training.interrupt(training.train, index) != "" for index in indices) > NUM_TRIED / 2
    assert replays or training.num_done < len(indices) / 2 + 2  # most are undone
    training.step.close()


@pytest.mark.parametrize(("name", "num_before"), [("evaluate", 0), ("evaluate", 2), ("verify", 0)])
def test_other_calls_that_are_interrupted_anywhere_leave_no_trace(
    name: str, num_before: int
) -> None:
    training = replaying(6)

    def call() -> object:
        if name == "evaluate":
            return training.step.evaluate(batch(0))
        training.step.verify(1)
        return None

    expected, places = call(), training.places(call)
    for _ in range(num_before):
        call()
    for index in chosen(places, NUM_TRIED // (2 if name == "evaluate" else 4)):
        training.interrupt(call, index)
    assert name != "evaluate" or torch.equal(call(), expected)  # type: ignore[arg-type]
    training.train()
    training.check("after")
    training.step.close()


@pytest.mark.parametrize("example", [None, batch(0)], ids=["later", "ahead of time"])
def test_a_capture_call_or_a_close_that_is_interrupted_anywhere_can_be_repeated(
    example: Tensor | None,
) -> None:
    training = Interrupted(3, warmup_steps=1)
    training.step.close()
    steps: list[graphfsdp.CapturedStep] = []

    def capture() -> None:
        steps.append(training.captured(warmup_steps=1, example_batch=example))

    def close() -> None:
        steps[-1].close()

    def interrupted(call: Callable[[], None], index: int) -> BaseException | None:
        try:
            with InterruptAt(index):
                call()
        except KeyboardInterrupt as error:
            return error
        return None

    capturing, closing = InterruptAt(), InterruptAt()
    for _ in range(2):
        with capturing:
            capture()
        with closing:
            close()
    num = NUM_TRIED // (4 if example is None else 10)
    errors = []  # with all frames, and what they hold
    for index in chosen(capturing.places, num):
        errors.append(interrupted(capture, index))
        steps.clear()
    for index in chosen(closing.places, num):
        capture()
        errors.append(interrupted(close, index))
        close()
        assert steps[-1].phase is Phase.CLOSED
    assert sum(error is not None for error in errors) > num / 2
    training.step = training.captured(warmup_steps=1)
    for _ in range(3):
        training.train()
        training.check("after")
    training.step.close()


class SignalError(Exception):
    """Raised by a handler."""


@contextmanager
def handling(told: list[int], *numbers: int) -> Iterator[None]:
    """Note signals in the body, and raise."""

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
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


def test_all_signals_are_delivered_although_each_handler_raises() -> None:
    step, told = replaying(4).step, list[int]()
    both = (signal.SIGINT, signal.SIGTERM)
    with handling(told, *both):
        # As in the kernel, a waiting signal is one signal.
        with pytest.raises(SignalError, match="SIGTERM"), SignalAt(3, *both, *both):
            step(batch(0))
        assert told == [*both]
        assert step.phase is Phase.REPLAY  # which is complete, not torn
        for number in both:  # all are handled as before
            with pytest.raises(SignalError):
                signal.raise_signal(number)


class Waiting(nn.Module):
    """Does something between two operators of its forward."""

    def __init__(self, between: Callable[[], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.between()
        loss: Tensor = self.layers[1](x).square().mean()
        return loss


def press_when_in(function: CodeType) -> None:
    """Have SIGINT come when this thread is in there; do not wait for it."""
    thread = threading.get_ident()

    def run() -> None:
        if until(lambda: sys._current_frames()[thread].f_code is function, 60, pause_s=0.05):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=run, daemon=True).start()


@pytest.mark.parametrize("scope", ["full_iteration", "none"])
def test_a_model_that_waits_hears_ctrl_c_at_once(scope: str) -> None:
    between: list[Callable[[], object]] = [lambda: None]
    model = Waiting(lambda: between[0]())
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    with graphfsdp.capture(model, optimizer, scope=scope) as step:
        step(batch(0))
        world = World(model, optimizer)
        woke: list[object] = []

        def nap() -> None:
            time.sleep(40)
            woke.append("by itself")

        between[0] = nap
        press_when_in(nap.__code__)
        with pytest.raises(KeyboardInterrupt) as caught:
            step(batch(1))
        assert not woke
        world.assert_unchanged(scope, without_gradients=scope == "none")
        between[0] = lambda: None
        for _ in range(6):
            step(batch(1))
        step.close()
        assert caught.tb is not None  # whose frames hold what they were in


def test_other_threads_and_handlers_that_are_not_pythons_are_left_alone() -> None:
    between: list[Callable[[], object]] = [lambda: None]
    model = Waiting(lambda: between[0]())
    found: list[object] = []
    between[0] = lambda: found.extend(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM)))
    with graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.1)) as step:
        thread = threading.Thread(target=step, args=(batch(0),))
        thread.start()
        thread.join()
        step(batch(0))
    assert found[0] is signal.getsignal(signal.SIGINT) is not found[2]
    assert found[1] is signal.SIG_DFL is found[3] is signal.getsignal(signal.SIGTERM)
