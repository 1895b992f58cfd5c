"""Sees the calls that bypass the dispatcher: generator state and compiled regions."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from graphfsdp._capture.rules import Refusal, compiled_region, generator_state

_STATE_METHODS = frozenset({"get_state", "set_state", "manual_seed", "seed", "clone_state"})


@contextmanager
def host_watch(refuse: Callable[[str, Refusal], None]) -> Iterator[None]:
    """Report calls that no dispatch mode and no function mode can see, while the body runs.

    ``torch.Generator`` and the entry of a compiled region are reached through Python's profile
    hook: it sees calls of C methods too, and nothing of torch needs to be patched. An already
    installed hook goes on being called.

    Args:
        refuse: Called with the name of the operation and the refusal; it raises.
    """
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

    sys.setprofile(hook)
    try:
        yield
    finally:
        if previous is None or callable(previous):
            sys.setprofile(previous)
        else:  # a profiler written in C (cProfile), which pauses meanwhile
            previous.enable()


def _enters_compiled(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py")


def _compiled_name(frame: FrameType) -> str:
    function = frame.f_locals.get("fn")
    return f"{getattr(function, '__qualname__', type(function).__name__)}()"


__all__ = ["host_watch"]
