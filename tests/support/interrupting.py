"""Ctrl-C between any two instructions of the library, and what must hold behind it."""

import pathlib
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

import graphfsdp
from faults_at_operators import World
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, snapshot

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

    def __init__(self, index: int | None = None, only: tuple[str, ...] = ("",)) -> None:
        self._index = index
        self._only = only  # how the names of our files end in which it may come
        self.places: dict[Place, list[int]] = {}
        self.num_passed = 0
        self.fired = ""

    def __enter__(self) -> "InterruptAt":
        sys.settrace(self._on_call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
                return path if file.endswith(self._only) else []
            if not file.endswith(CONTEXTS):
                return []
            frame = frame.f_back
        return []


class Net(nn.Module):
    """Running statistics and dropout: what an iteration changes besides the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


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
        model = Net()
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

    def places(self, call: Callable[[], object], *only: str) -> dict[Place, list[int]]:
        """Return where an interrupt of a call can come, behind one that has filled caches."""
        for _ in range(2):
            with InterruptAt(only=only or ("",)) as counting:
                call()
        self.check("counted")
        return counting.places

    def interrupt(self, call: Callable[[], object], index: int, *only: str) -> str:
        """Interrupt a call, and look at everything; return where, "" if it ended before."""
        world = World(self.model, self.optimizer)
        handler, profile = signal.getsignal(signal.SIGINT), sys.getprofile()
        mode = InterruptAt(index, only or ("",))
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
