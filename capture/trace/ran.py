"""Which Python code an iteration has run."""

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import CodeType, FrameType, FunctionType
from typing import Any

from graphfsdp._capture.trace.source import (
    is_installed_file,
    is_our_file,
    is_torchs_file,
    is_users_file,
)
from graphfsdp.base.torch_internals import dispatch_mode_stack

_LOGS = logging.Logger.callHandlers.__code__  # what a logger's level lets through
_TELLS = ("print", "write", "writelines", "put")  # names of functions in C


class Ran:
    """The code objects that ran: of functions, methods, hooks, and what Python calls by itself.

    Note [What ran is known]: a replay runs no Python, so what Python reads is baked into a
    recording. Which code that is can only be guessed from outside, since calls go through
    wrappers, registries, operators, hooks and autograd. But each call is told to a profile hook,
    and a recording has one. So nobody follows calls: the code that ran is known, and what it reads
    by name is in it.

    What a dispatch mode does that is on around the iteration is none of it: it watches.

    Attributes:
        codes: All of it.
        asked: Calls of users' code that have told the time or asked for a file, in words.
        told: Names of the functions that have printed, logged, or put something into a queue or a
            file, in what was noted; what they are called with is found nowhere else.
    """

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.asked: dict[str, None] = {}
        self.told: list[str] = []
        self._watching: set[CodeType] = set()  # of modes around it

    def by_users(self) -> set[CodeType]:
        """Return what users wrote, or what they have installed, but for torch."""
        found = {code for code in self.codes if is_users_file(code.co_filename)}
        return found - self._watching

    def near(self) -> set[CodeType]:
        """Return what users wrote themselves."""
        return {code for code in self.by_users() if not is_installed_file(code.co_filename)}

    def not_ours(self) -> set[CodeType]:
        return {code for code in self.codes if not is_our_file(code.co_filename)}

    def readable(self) -> list[CodeType]:
        """Return all but torch's and graphfsdp's own, what users wrote first."""
        near = self.near()
        others = self.not_ours() - near
        return [*near, *(code for code in others if not is_torchs_file(code.co_filename))]

    def leave_out_modes(self) -> None:
        """Leave out the methods of the dispatch modes that are on."""
        for mode in dispatch_mode_stack():
            members = (each for base in type(mode).__mro__ for each in vars(base).values())
            self._watching |= {each.__code__ for each in members if isinstance(each, FunctionType)}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what this thread runs in the body; beside a profiler in C, nothing."""
        previous = sys.getprofile()
        if previous is not None and not callable(previous):
            yield
            return
        self.leave_out_modes()
        codes, thread = self.codes, threading.get_ident()
        told: list[str] = []
        self.told = told

        def hook(frame: FrameType, event: Any, arg: Any) -> None:
            if event == "call":
                codes.add(frame.f_code)
                if frame.f_code is _LOGS:
                    told.append("logging")
            elif event == "c_call" and arg.__name__ in _TELLS and _is_told(arg):
                told.append(arg.__name__)
            if previous is not None and threading.get_ident() == thread:
                previous(frame, event, arg)

        sys.setprofile(hook)
        try:
            yield
        finally:
            sys.setprofile(previous)


def _is_told(function: Any) -> bool:
    return function is print or isinstance(function.__self__, (io.IOBase, SimpleQueue))
