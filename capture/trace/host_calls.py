"""Judges Python and C calls that no dispatch mode and no function mode sees."""

import random
from types import FrameType
from typing import Any

import torch

from graphfsdp._capture.rules.refusals import (
    UNSUPPORTED,
    Refusal,
    compiled_region,
    generator_state,
    host_wait,
)
from graphfsdp._capture.trace.source import is_users_file
from graphfsdp.base.hazards import HazardKind

_STATE_METHODS = frozenset({"get_state", "set_state", "manual_seed", "seed", "clone_state"})
_DRAWS = frozenset({"random", "getrandbits"})  # all others of random.Random are made of these
_WAITS = frozenset({"query", "synchronize", "elapsed_time"})
_OBJECT_COLLECTIVES = frozenset(
    {
        *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
        *("send_object_list", "recv_object_list", "monitored_barrier"),
    }
)
STREAMS_FILE = "torch/cuda/streams.py"
_COMPILE_FILE = "_dynamo/eval_frame.py"
_THREAD_FILE = "threading.py"
_POOL_FILE = "concurrent/futures/thread.py"
_CUDA_FILE = "torch/cuda/__init__.py"
_COLLECTIVES_FILE = "distributed_c10d.py"
# LRScheduler itself and its like, and the one of averaged weights.
_SCHEDULER_FILES = ("torch/optim/lr_scheduler.py", "torch/optim/swa_utils.py")
# The ends of the names of the files whose functions `judge_call` knows, and the names of what
# `judge_c_call` knows: for all others both return None.
JUDGED_FILES = (
    STREAMS_FILE,
    _COMPILE_FILE,
    _THREAD_FILE,
    _POOL_FILE,
    _CUDA_FILE,
    _COLLECTIVES_FILE,
    *_SCHEDULER_FILES,
)
JUDGED_C_NAMES = _STATE_METHODS | _DRAWS | _WAITS | {"resize_", "data_ptr"}
_Judged = tuple[str, Refusal] | None


def judge_c_call(function: Any, caller: FrameType) -> _Judged:
    """Judge a call of a function written in C.

    Args:
        function: The function, bound to its object if it is a method.
        caller: The frame that calls it.

    Returns:
        Its name and the refusal, or None.
    """
    owner = getattr(function, "__self__", None)
    if owner is None:
        return None
    name = function.__name__
    if isinstance(owner, torch.Generator) and name in _STATE_METHODS:
        full = f"torch.Generator.{name}"
        return full, generator_state(full)
    if isinstance(owner, random.Random) and name in _DRAWS:
        full = f"random.Random.{name}"
        return full, _python_random(full)
    if isinstance(owner, torch.UntypedStorage):
        return _judge_storage(name, caller)
    if isinstance(owner, torch.Event | torch.Stream) and name in _WAITS:
        if caller.f_code.co_filename.endswith(STREAMS_FILE):
            return None  # judged as the Python call that it is a part of
        full = f"torch.{type(owner).__name__}.{name}"
        return full, host_wait(full)
    return None


def judge_call(frame: FrameType) -> _Judged:
    """Judge a call of a Python function by the frame that it has just got."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    if name == "compile_wrapper":
        if file.endswith(_COMPILE_FILE):
            return "torch.compile", compiled_region(_compiled_name(frame))
    elif name == "step":
        if file.endswith(_SCHEDULER_FILES):
            full = f"{type(frame.f_locals.get('self')).__name__}.step"
            return full, _scheduler(full)
    elif name == "start":
        if file.endswith(_THREAD_FILE) and "self" in frame.f_locals:
            return "threading.Thread.start", _thread("threading.Thread.start")
    elif name == "submit":
        if file.endswith(_POOL_FILE):
            return "ThreadPoolExecutor.submit", _thread("ThreadPoolExecutor.submit")
    elif name in _WAITS:
        if file.endswith(STREAMS_FILE):
            full = f"torch.cuda.{type(frame.f_locals.get('self')).__name__}.{name}"
            return full, host_wait(full)
        if file.endswith(_CUDA_FILE) and not _begins_capture(frame):
            return "torch.cuda.synchronize", host_wait("torch.cuda.synchronize")
    elif name in _OBJECT_COLLECTIVES and file.endswith(_COLLECTIVES_FILE):
        return f"torch.distributed.{name}", _object_collective(f"torch.distributed.{name}")
    return None


def _begins_capture(frame: FrameType) -> bool:
    caller = frame.f_back  # torch.cuda.graph synchronizes before it begins
    return caller is not None and caller.f_code.co_filename.endswith("torch/cuda/graphs.py")


def is_object_collective(frame: FrameType) -> bool:
    """Tell whether a frame is that of a collective of Python objects."""
    code = frame.f_code
    return code.co_name in _OBJECT_COLLECTIVES and code.co_filename.endswith(_COLLECTIVES_FILE)


def _judge_storage(name: str, caller: FrameType) -> _Judged:
    full = f"torch.UntypedStorage.{name}"
    if name == "resize_":
        return full, Refusal(
            f"{full} gives memory back or takes new memory inside the iteration, below all "
            "operators; a graph's addresses are fixed, so a replay would use freed memory",
            "keep the storage at its full size (graphfsdp.fully_shard frees by letting go)",
            HazardKind.MEMORY,
        )
    if name == "data_ptr" and is_users_file(caller.f_code.co_filename):
        return full, raw_address(full)
    return None


def raw_address(how: str) -> Refusal:
    """Return the refusal of an address that is handed out to code which no operator shows."""
    return Refusal(
        f"{how} hands out an address; what is read or written through it (ctypes, NumPy, a C "
        "library) is in no recording, and in a replay intermediate tensors lie elsewhere",
        "make the code an operator that declares what it writes (torch.library.custom_op)",
        HazardKind.HIDDEN_WRITE,
    )


def _python_random(how: str) -> Refusal:
    return Refusal(
        f"{how} draws from a generator of Python inside the iteration; a replay runs no Python, "
        "so this one number, or the branch that it decides, would stay for ever",
        "draw on the device (torch.rand), or draw outside and pass the number as a tensor of "
        "the batch",
        HazardKind.BAKED_NUMBER,
    )


def _scheduler(how: str) -> Refusal:
    return Refusal(
        f"{how} counts in Python and sets learning rates inside the iteration; a replay runs no "
        "Python, so the schedule would stand still",
        "call it after the captured step, outside the iteration: replays see the learning rates "
        "that it sets",
        HazardKind.BAKED_NUMBER,
    )


def _thread(how: str) -> Refusal:
    return Refusal(
        f"{how} hands work to another Python thread inside the iteration; a recording follows "
        "one thread, so what the other one computes or reads is missing from every replay",
        "do it on the thread of the iteration, or outside the iteration",
        HazardKind.THREAD,
    )


def _object_collective(how: str) -> Refusal:
    return Refusal(
        f"{how} sends Python objects between ranks inside the iteration; it reads lengths on the "
        "host, and a replay runs no Python that could send new ones",
        "exchange tensors of fixed shape (functional collectives), or do it outside the iteration",
        HazardKind.COLLECTIVE,
        UNSUPPORTED,
    )


def _compiled_name(frame: FrameType) -> str:
    function = frame.f_locals.get("fn")
    return f"{getattr(function, '__qualname__', type(function).__name__)}()"
