"""Sees the calls that bypass the dispatcher: generator state, threads, compiled regions."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from torch.overrides import TorchFunctionMode

from graphfsdp._capture.host_calls import (
    STREAMS_FILE,
    is_object_collective,
    judge_c_call,
    judge_call,
)
from graphfsdp._capture.rules import Refusal


class HostListener(Protocol):
    """Whoever wants to know of calls on the host."""

    def on_host_call(self, name: str, refusal: Refusal) -> None:
        """Take note of a call that a graph cannot hold; may raise."""
        ...

    def on_opaque_call(self, begins: bool) -> None:
        """Take note that a call begins or ends whose inside is the same finding."""
        ...

    def on_stream_call(self, frame: FrameType) -> None:
        """Take note of a Python call of torch.cuda's streams and events."""
        ...


@contextmanager
def host_watch(listener: HostListener, function_mode: TorchFunctionMode) -> Iterator[None]:
    """Report calls that no dispatch mode and no function mode can see, while the body runs.

    ``torch.Generator``, threads and the entry of a compiled region are reached through Python's
    profile hook: it sees calls of C methods too, and nothing of torch needs to be patched. An
    already installed hook goes on being called.

    Note [Functions in a backward]: torch.autograd.backward is a torch function itself, and a
    function mode is off while one of those runs. The hook puts it on again where autograd's
    engine starts, so that gradient hooks and custom backwards are watched like a forward.

    Args:
        listener: Told of each such call.
        function_mode: The mode that is to be on inside autograd's engine too.
    """
    previous = sys.getprofile()
    hook = _Hook(listener, function_mode, previous if callable(previous) else None)
    sys.setprofile(hook)
    try:
        yield
    finally:
        hook.end()
        if previous is None or callable(previous):
            sys.setprofile(previous)
        else:  # a profiler written in C (cProfile), which pauses meanwhile
            previous.enable()


class _Hook:
    """What Python calls at each call and return."""

    def __init__(
        self,
        listener: HostListener,
        function_mode: TorchFunctionMode,
        previous: Callable[[FrameType, Any, Any], object] | None,
    ) -> None:
        self._listener = listener
        self._function_mode = function_mode
        self._previous = previous
        self._num_engines = 0

    def __call__(self, frame: FrameType, event: Any, arg: Any) -> None:
        if self._previous is not None:
            self._previous(frame, event, arg)
        if event == "c_call":
            self._report(judge_c_call(arg, frame))
        elif event == "call":
            if _runs_engine(frame):
                self._num_engines += 1
                self._function_mode.__enter__()
            else:
                if frame.f_code.co_filename.endswith(STREAMS_FILE):
                    self._listener.on_stream_call(frame)
                self._report(judge_call(frame))
                if is_object_collective(frame):
                    self._listener.on_opaque_call(begins=True)
        elif event == "return":
            if _runs_engine(frame):
                if self._num_engines:
                    self._num_engines -= 1
                    self._function_mode.__exit__(None, None, None)
            elif is_object_collective(frame):
                self._listener.on_opaque_call(begins=False)

    def end(self) -> None:
        """Take the function mode off again."""
        # A hook that raises is removed by Python, and does not see its engines return.
        for _ in range(self._num_engines):
            self._function_mode.__exit__(None, None, None)

    def _report(self, judged: tuple[str, Refusal] | None) -> None:
        if judged is not None and not _imports_a_module():
            self._listener.on_host_call(*judged)


def _imports_a_module() -> bool:
    """Tell whether a module is being imported: what it does then, it does once and for all."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _runs_engine(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "_engine_run_backward" and code.co_filename.endswith("autograd/graph.py")


__all__ = ["HostListener", "host_watch"]
