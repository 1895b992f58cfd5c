"""Sees the calls that bypass the dispatcher: generator state and compiled regions."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphfsdp._capture.rules import Refusal, compiled_region, generator_state

_STATE_METHODS = frozenset({"get_state", "set_state", "manual_seed", "seed", "clone_state"})


@contextmanager
def host_watch(
    refuse: Callable[[str, Refusal], None], function_mode: TorchFunctionMode
) -> Iterator[None]:
    """Report calls that no dispatch mode and no function mode can see, while the body runs.

    ``torch.Generator`` and the entry of a compiled region are reached through Python's profile
    hook: it sees calls of C methods too, and nothing of torch needs to be patched. An already
    installed hook goes on being called.

    Note [Functions in a backward]: torch.autograd.backward is a torch function itself, and a
    function mode is off while one of those runs. The hook puts it on again where autograd's
    engine starts, so that gradient hooks and custom backwards are watched like a forward.

    Args:
        refuse: Called with the name of the operation and the refusal; it raises.
        function_mode: The mode that is to be on inside autograd's engine too.
    """
    num_engines = 0
    previous = sys.getprofile()
    generator_type = torch.Generator

    def hook(frame: FrameType, event: Any, arg: Any) -> None:
        if callable(previous):
            previous(frame, event, arg)
        if event == "c_call":
            owner = getattr(arg, "__self__", None)
            if isinstance(owner, generator_type) and arg.__name__ in _STATE_METHODS:
                name = f"torch.Generator.{arg.__name__}"
                refuse(name, generator_state(name))
        elif event == "call" and _enters_compiled(frame):
            refuse("torch.compile", compiled_region(_compiled_name(frame)))
        elif event in ("call", "return") and _runs_engine(frame):
            nonlocal num_engines
            if event == "call":
                function_mode.__enter__()
            elif num_engines:
                function_mode.__exit__(None, None, None)
            num_engines += 1 if event == "call" else -1

    sys.setprofile(hook)
    try:
        yield
    finally:
        # A hook that raises is removed by Python, and does not see its engines return.
        for _ in range(num_engines):
            function_mode.__exit__(None, None, None)
        if previous is None or callable(previous):
            sys.setprofile(previous)
        else:  # a profiler written in C (cProfile), which pauses meanwhile
            previous.enable()


def _enters_compiled(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py")


def _runs_engine(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "_engine_run_backward" and code.co_filename.endswith("autograd/graph.py")


def _compiled_name(frame: FrameType) -> str:
    function = frame.f_locals.get("fn")
    return f"{getattr(function, '__qualname__', type(function).__name__)}()"


__all__ = ["host_watch"]
