"""Sees the calls that bypass the dispatcher: generator state, threads, compiled regions."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from torch.overrides import TorchFunctionMode

from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp._capture.trace.host_calls import (
    JUDGED_C_NAMES,
    JUDGED_FILES,
    STREAMS_FILE,
    is_object_collective,
    judge_c_call,
    judge_call,
)

ENGINE_FILE = "autograd/graph.py"


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
def host_watch(
    listener: HostListener, function_mode: TorchFunctionMode
) -> Iterator[Callable[[], None]]:
    """Report calls that no dispatch mode and no function mode can see, while the body runs.

    ``torch.Generator``, threads and the entry of a compiled region are reached through Python's
    profile hook: it sees calls of C methods too, and nothing of torch needs to be patched. An
    already installed hook goes on being called.

    Note [Functions in a backward]: torch.autograd.backward is a torch function itself, and a
    function mode is off while one of those runs. The hook puts it on again where autograd's
    engine starts, so that gradient hooks and custom backwards are watched like a forward.

    Note [Autograd's threads]: what is on a GPU, autograd computes the gradients of on a thread of
    its own, which takes torch's modes along and Python's profile hook not. So whoever sees the
    first operator there calls what this yields.

    Args:
        listener: Told of each such call.
        function_mode: The mode that is to be on inside autograd's engine too.

    Yields:
        A function that watches the thread that calls it as well.
    """
    previous = sys.getprofile()
    hook = _Hook(listener, function_mode, previous if callable(previous) else None)
    sys.setprofile(hook.on_event)
    try:
        yield hook.follow
    finally:
        hook.end()
        if previous is None or callable(previous):
            sys.setprofile(previous)
        else:  # a profiler written in C (cProfile), which pauses meanwhile
            previous.enable()


class _Hook:
    """What Python calls at each call and return.

    An iteration makes hundreds of thousands of calls, nearly all of them in files and of names
    that mean nothing here, so these are told first.
    """

    def __init__(
        self,
        listener: HostListener,
        function_mode: TorchFunctionMode,
        previous: Callable[[FrameType, Any, Any], object] | None,
    ) -> None:
        self._listener = listener
        self._function_mode = function_mode
        self._previous = previous
        self._thread = threading.get_ident()
        self._num_engines: dict[int, int] = {}  # by thread, since modes belong to threads
        self._is_judged: dict[str, bool] = {}  # by file name
        self._is_over = False

    def follow(self) -> None:
        """Watch this thread too, until all is over; one with a profiler is left alone."""
        if sys.getprofile() is None:
            sys.setprofile(self.on_event_elsewhere)

    def on_event_elsewhere(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take an event of another thread, or let go of it; see sys.setprofile."""
        if self._is_over:
            sys.setprofile(None)
        else:
            self.on_event(frame, event, arg)

    def on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take an event; see sys.setprofile."""
        if self._previous is not None and threading.get_ident() == self._thread:
            self._previous(frame, event, arg)
        if event == "c_call":
            if arg.__name__ in JUDGED_C_NAMES:
                self._report(judge_c_call(arg, frame))
        elif event in ("call", "return"):
            file = frame.f_code.co_filename
            is_judged = self._is_judged.get(file)
            if is_judged is None:
                is_judged = self._is_judged[file] = file.endswith((ENGINE_FILE, *JUDGED_FILES))
            if is_judged:
                self._on_python(frame, begins=event == "call")

    def _on_python(self, frame: FrameType, *, begins: bool) -> None:
        if _runs_engine(frame):
            thread = threading.get_ident()
            if begins:
                self._num_engines[thread] = self._num_engines.get(thread, 0) + 1
                self._function_mode.__enter__()
            elif self._num_engines.get(thread):
                self._num_engines[thread] -= 1
                self._function_mode.__exit__(None, None, None)
            return
        if begins:
            if frame.f_code.co_filename.endswith(STREAMS_FILE):
                self._listener.on_stream_call(frame)
            self._report(judge_call(frame))
        if is_object_collective(frame):
            self._listener.on_opaque_call(begins)

    def end(self) -> None:
        """Take the function mode off again; other threads let go at their next call."""
        self._is_over = True
        # A hook that raises is removed by Python, and does not see its engines return.
        for _ in range(self._num_engines.get(self._thread, 0)):
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
    return code.co_name == "_engine_run_backward" and code.co_filename.endswith(ENGINE_FILE)
