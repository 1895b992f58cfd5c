"""Sees and judges calls on the host that neither a dispatch mode nor a function mode sees."""

import datetime
import io
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch.overrides import TorchFunctionMode

from graphfsdp._capture.rules.refusals import (
    COMPILED,
    GENERATOR_STATE,
    HOST_WAIT,
    OBJECT_COLLECTIVE,
    PYTHON_RANDOM,
    RAW_ADDRESS,
    RESIZED_STORAGE,
    SCHEDULER,
    THREAD,
    Judged,
    Refusal,
)
from graphfsdp._capture.trace.source import Ran, frames, is_users_file
from graphfsdp.errors import SourceLine

_ENGINE_FILE = "autograd/graph.py"
_STREAMS_FILE = "torch/cuda/streams.py"
_WAITS = ("query", "synchronize", "elapsed_time")
_OBJECT_COLLECTIVES = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "monitored_barrier"),
)


class _CRule(NamedTuple):
    """Methods written in C: of which class, their names, what the class is called, why not."""

    kind: type
    names: tuple[str, ...]
    called: str
    refusal: Refusal


class _PythonRule(NamedTuple):
    """Python functions: end of their file, their names, what they are called, why not."""

    file: str
    names: tuple[str, ...]
    called: str  # {name}: the function; {owner}: the class of self; {compiled}: what was compiled
    refusal: Refusal


_C_RULES = (
    _CRule(
        torch.Generator,
        ("get_state", "set_state", "manual_seed", "seed", "clone_state"),
        "torch.Generator",
        GENERATOR_STATE,
    ),
    # All others of random.Random are made of these.
    _CRule(random.Random, ("random", "getrandbits"), "random.Random", PYTHON_RANDOM),
    _CRule(torch.UntypedStorage, ("resize_",), "torch.UntypedStorage", RESIZED_STORAGE),
    _CRule(torch.UntypedStorage, ("data_ptr",), "torch.UntypedStorage", RAW_ADDRESS),
    _CRule(torch.Event, _WAITS, "torch.Event", HOST_WAIT),
    _CRule(torch.Stream, _WAITS, "torch.Stream", HOST_WAIT),
)
# What draws what nobody can draw again, by module and name: all of secrets, uuid,
# random.SystemRandom and an unseeded generator of NumPy end in these.
_ENTROPY = (
    *((module, "urandom") for module in ("posix", "nt", "os")),
    *(("posix", "getrandom"), ("_uuid", "generate_time_safe")),
)
_PYTHON_RULES = (
    _PythonRule("_dynamo/eval_frame.py", ("compile_wrapper",), "torch.compile", COMPILED),
    # LRScheduler itself and its like, and the one of averaged weights.
    _PythonRule("torch/optim/lr_scheduler.py", ("step",), "{owner}.step", SCHEDULER),
    _PythonRule("torch/optim/swa_utils.py", ("step",), "{owner}.step", SCHEDULER),
    _PythonRule("threading.py", ("start",), "threading.Thread.start", THREAD),
    _PythonRule("concurrent/futures/thread.py", ("submit",), "ThreadPoolExecutor.submit", THREAD),
    _PythonRule("torch/cuda/__init__.py", _WAITS, "torch.cuda.synchronize", HOST_WAIT),
    _PythonRule(
        "distributed_c10d.py", _OBJECT_COLLECTIVES, "torch.distributed.{name}", OBJECT_COLLECTIVE
    ),
)
# For all other files and names nothing has to be looked at.
_FILES = (_ENGINE_FILE, _STREAMS_FILE, *(rule.file for rule in _PYTHON_RULES))
_C_NAMES = frozenset(
    (*(name for rule in _C_RULES for name in rule.names), *(name for _, name in _ENTROPY))
)
# What tells the time: functions of the module time, and class methods of dates.
_CLOCKS = frozenset(
    {
        *(time.time, time.time_ns, time.monotonic, time.monotonic_ns),
        *(time.perf_counter, time.perf_counter_ns, time.process_time, time.process_time_ns),
        *(time.thread_time, time.thread_time_ns, time.localtime, time.gmtime),
        *(time.ctime, time.asctime, time.strftime),
    }
)
_OF_DATES = ("now", "utcnow", "today")
# What asks for files: os.path.exists, Path.read_text and their like end in these.
_OF_FILES = frozenset(
    {io.open, os.open, os.stat, os.lstat, os.access, os.listdir, os.scandir, os.readlink}
)
_READS = ("read", "readline", "readlines", "readinto")  # methods of files
_C_ASKING = frozenset((*(each.__name__ for each in (*_CLOCKS, *_OF_FILES)), *_OF_DATES, *_READS))
# What looks at source files to tell of a line of them.
_TELLERS = ("linecache.py", "warnings.py", "inspect.py", "traceback.py", "tokenize.py")


def _judge_c_call(function: Any, caller: FrameType) -> Judged:
    owner = getattr(function, "__self__", None)
    if (getattr(owner, "__name__", ""), function.__name__) in _ENTROPY:
        called = f"os.{function.__name__}"
        return called, PYTHON_RANDOM.of(called)
    for rule in _C_RULES:
        if function.__name__ not in rule.names or not isinstance(owner, rule.kind):
            continue
        file = caller.f_code.co_filename
        if rule.refusal is RAW_ADDRESS and not is_users_file(file):
            return None
        called = f"{rule.called}.{function.__name__}"
        return called, rule.refusal.of(called)
    return None


def _up_to_user(caller: FrameType) -> list[FrameType]:
    """Return the frames from one up to the next of users' code, or to the last."""
    found = [caller]
    while not is_users_file(found[-1].f_code.co_filename) and found[-1].f_back is not None:
        found.append(found[-1].f_back)
    return found


def _judge_call(frame: FrameType) -> Judged:
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    for rule in _PYTHON_RULES:
        if name not in rule.names or not file.endswith(rule.file):
            continue
        if rule.refusal is THREAD and "self" not in frame.f_locals:
            return None
        if rule.called == "torch.cuda.synchronize" and _begins_capture(frame):
            return None
        owner = type(frame.f_locals.get("self")).__name__
        called = rule.called.format(name=name, owner=owner)
        if rule.refusal is COMPILED:
            function = frame.f_locals.get("fn")
            compiled = getattr(function, "__qualname__", type(function).__name__)
            return called, COMPILED.of(f"{compiled}()")
        return called, rule.refusal.of(called)
    return None


def _begins_capture(frame: FrameType) -> bool:
    caller = frame.f_back  # torch.cuda.graph synchronizes before it begins
    return caller is not None and caller.f_code.co_filename.endswith("torch/cuda/graphs.py")


_Profile = Callable[[FrameType, Any, Any], object]


class HostListener(Protocol):
    """Whoever wants to know of calls on the host."""

    def on_host_call(self, name: str, refusal: Refusal) -> None:
        """Take note of a call that a graph cannot hold; may raise."""

    def on_opaque_call(self, begins: bool) -> None:
        """Take note that a call begins or ends whose inside is the same finding."""

    def on_stream_call(self, frame: FrameType) -> None: ...


@contextmanager
def host_watch(listener: HostListener, function_mode: TorchFunctionMode) -> Iterator["HostWatch"]:
    """Report calls that no mode can see, while the body runs.

    ``torch.Generator``, threads and the entry of a compiled region are reached through Python's
    profile hook: it sees calls of C methods too, and nothing of torch needs to be patched. An
    already installed hook goes on being called.

    Note [Functions in a backward]: torch.autograd.backward is a torch function itself, and a
    function mode is off while one of those runs. The hook puts it on again where autograd's
    engine starts, so that gradient hooks and custom backwards are watched like a forward.

    Note [Autograd's threads]: what is on a GPU, autograd computes the gradients of on a thread of
    its own, which takes torch's modes along and Python's profile hook not. So whoever sees the
    first operator there calls ``follow``.
    """
    previous = sys.getprofile()
    hook = HostWatch(listener, function_mode, previous if callable(previous) else None)
    sys.setprofile(hook.on_event)
    try:
        yield hook
    finally:
        hook.end()
        if previous is None or callable(previous):
            sys.setprofile(previous)
        else:  # a profiler written in C (cProfile), which pauses meanwhile
            previous.enable()


class HostWatch:
    """What Python calls at each call and return.

    An iteration makes hundreds of thousands of calls, nearly all of them in files and of names
    that mean nothing here, so these are told first. Most of them would be those of our own code
    for each operator: see Note [Our own Python].

    Attributes:
        leaves_out_modes: It may pause there; nobody else has a profiler that is told of all.
        ran: All Python code that was called, and what that has asked the system.
    """

    def __init__(
        self,
        listener: HostListener,
        function_mode: TorchFunctionMode,
        previous: _Profile | None,
    ) -> None:
        self._listener = listener
        self._function_mode = function_mode
        self._previous = previous
        self.leaves_out_modes = previous is None
        self._followed: set[int] = set()  # threads
        self._thread = threading.get_ident()
        self._num_engines: dict[int, int] = {}  # by thread, since modes belong to threads
        self._is_judged: dict[str, bool] = {}  # by file name
        self.ran = Ran()
        self._is_over = False

    def follow(self) -> None:
        """Watch this thread too, until all is over; one with a profiler is left alone."""
        thread = threading.get_ident()
        if thread not in self._followed and sys.getprofile() is None:
            sys.setprofile(self.on_event_elsewhere)
        self._followed.add(thread)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Watch this thread inside of a stretch that is not watched."""
        if sys.getprofile() is not None:
            yield
            return
        is_first = threading.get_ident() == self._thread
        sys.setprofile(self.on_event if is_first else self.on_event_elsewhere)
        try:
            yield
        finally:
            if getattr(sys.getprofile(), "__self__", None) is self:
                sys.setprofile(None)

    def on_event_elsewhere(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take an event of another thread, or let go of it; see sys.setprofile."""
        if self._is_over:
            sys.setprofile(None)
        else:
            self.on_event(frame, event, arg)

    def on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._previous is not None and threading.get_ident() == self._thread:
            self._previous(frame, event, arg)
        if event == "c_call":
            if arg.__name__ in _C_NAMES:
                self._report(_judge_c_call(arg, frame))
            elif arg.__name__ in _C_ASKING:
                self._note_asked(arg, frame)
        elif event in ("call", "return"):
            self.ran.codes.add(frame.f_code)
            file = frame.f_code.co_filename
            is_judged = self._is_judged.get(file)
            if is_judged is None:
                is_judged = self._is_judged[file] = file.endswith(_FILES)
            if is_judged:
                self._on_python(frame, begins=event == "call")

    def _note_asked(self, function: Any, frame: FrameType) -> None:
        owner: Any = getattr(function, "__self__", None)
        is_date = isinstance(owner, type) and issubclass(owner, datetime.date)
        if function in _OF_FILES or isinstance(owner, io.IOBase):
            *inner, frame = _up_to_user(frame)
            tells = any(each.f_code.co_filename.endswith(_TELLERS) for each in inner)
            if tells or _imports_a_module():
                return
        elif not is_date and function not in _CLOCKS:
            return
        code = frame.f_code
        if is_users_file(code.co_filename):
            line = SourceLine(code.co_filename, frame.f_lineno, code.co_qualname)
            self.ran.asked[f"{function.__qualname__} ({line}) was asked"] = None

    def _on_python(self, frame: FrameType, *, begins: bool) -> None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "_engine_run_backward" and file.endswith(_ENGINE_FILE):
            thread = threading.get_ident()
            if begins:
                self._num_engines[thread] = self._num_engines.get(thread, 0) + 1
                self._function_mode.__enter__()
            elif self._num_engines.get(thread):
                self._num_engines[thread] -= 1
                self._function_mode.__exit__(None, None, None)
            return
        if begins:
            if file.endswith(_STREAMS_FILE):
                self._listener.on_stream_call(frame)
            self._report(_judge_call(frame))
        if name in _OBJECT_COLLECTIVES and file.endswith("distributed_c10d.py"):
            self._listener.on_opaque_call(begins)

    def end(self) -> None:
        """Take the function mode off again; other threads let go at their next call."""
        self._is_over = True
        # A hook that raises is removed by Python, and does not see its engines return.
        for _ in range(self._num_engines.get(self._thread, 0)):
            self._function_mode.__exit__(None, None, None)

    def _report(self, judged: Judged) -> None:
        if judged is not None and not _imports_a_module():
            self._listener.on_host_call(*judged)


def _imports_a_module() -> bool:
    """Tell whether a module is being imported: what it does then, it does once and for all."""
    return any(frame.f_code.co_filename == "<frozen importlib._bootstrap>" for frame in frames())
