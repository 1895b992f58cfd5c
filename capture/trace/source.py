"""Where in the user's program something comes from: phase, module, line; which code has run."""

import enum
import inspect
import io
import logging
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from traceback import walk_tb
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from graphfsdp import errors
from graphfsdp.base.torch_internals import (
    COMPILED_CALL,
    backward_node,
    dispatch_mode_stack,
    sequence_number,
)
from graphfsdp.errors import SourceLine

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(inspect.getfile(errors)).parent
_CAPTURE = (
    str(Path(__file__).parents[1]),
    *(str(_PACKAGE / folder) for folder in ("_capture", "preflight")),
)
# The trainer's models and scripts are a user's code as far as an error message goes.
_OURS = (
    *_CAPTURE,
    *(str(_PACKAGE / folder) for folder in ("base", "in_place", "optim", "sharding")),
    *(str(_PACKAGE.parent / folder) for folder in ("capture", "optim")),
)
_OUR_FOLDERS = tuple(f"{folder}{os.sep}" for folder in _OURS)
_TORCHS_FOLDER = f"{_TORCH}{os.sep}"
_SKIPPED = (_TORCHS_FOLDER, *_OUR_FOLDERS)
_PYTHON = sysconfig.get_path("stdlib")  # contextlib, copy and the like only pass calls on
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_LIBRARIES = ("/site-packages/", "/dist-packages/")  # of users, of the system, beside a venv
# Code that was typed, or given as a text: a prompt, a notebook, `python -c`, exec. Other names in
# angle brackets are those of code that Python or a library has made.
_TYPED = ("<stdin>", "<string>", "<console>", "<ipython-input", "<python-input", "<doctest ")
_NO_SEQUENCE = 2**64 - 1  # what AccumulateGrad has instead of a number of its own
_LOGS = logging.Logger.callHandlers.__code__  # what a logger's level lets through
_TELLS = ("print", "write", "writelines", "put")  # names of functions in C


def is_users_file(file: str) -> bool:
    """Tell whether a code object's file is neither torch's, nor Python's, nor ours."""
    if file.startswith("<"):
        return file.startswith(_TYPED)
    if file.startswith(_SKIPPED):
        return False
    if file.startswith(_PYTHON) and not is_installed_file(file):
        return False
    return str(Path(file).parent) != str(_PACKAGE)


def is_our_file(file: str) -> bool:
    return file.startswith(_OUR_FOLDERS)


def is_torchs_file(file: str) -> bool:
    return file.startswith(_TORCHS_FOLDER)


def file_of(module: types.ModuleType | None) -> str:
    """Return the file that a module was read from, or a name in angle brackets."""
    file: str | None = getattr(module, "__file__", None)
    is_made_by_hand = getattr(module, "__spec__", module) is None  # as that of a prompt is
    return file or ("<stdin>" if is_made_by_hand else "<none>")


def is_installed_file(file: str) -> bool:
    return file.startswith(_INSTALLED) or any(folder in file for folder in _LIBRARIES)


def user_source_line(*, in_backward: bool = False) -> SourceLine | None:
    """Return the innermost line of the running program that is neither torch's nor ours.

    ``in_backward``: of a hook or a custom backward, within autograd's engine.
    """
    for frame in frames():
        if in_backward and frame.f_code.co_name == "_engine_run_backward":
            break
        if is_users_file(frame.f_code.co_filename):
            return _line_in(frame.f_code, frame.f_lineno)
    return None


def frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, innermost first; for what runs rarely."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def called_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a mode for functions is to call, of what ``__torch_function__`` is given.

    torch's functions in Python hand themselves on by their names. Where users have put one of
    theirs under such a name, which calls torch's, that one would be called within itself.
    """
    if torch.compiler.is_compiling():  # which looks into this
        return function
    code = getattr(function, "__code__", None)
    if code is None or is_torchs_file(code.co_filename):
        return function
    handing = sys._getframe(2)
    called = handing.f_back
    if handing.f_code.co_name != "handle_torch_function" or called is None:
        return function
    if not is_torchs_file(called.f_code.co_filename) or called.f_code.co_freevars:
        return function
    return types.FunctionType(called.f_code, called.f_globals)


def user_line_of(error: BaseException) -> SourceLine | None:
    """Return the innermost line of the user's program that an exception has passed through."""
    found = None
    for frame, line in walk_tb(error.__traceback__):
        if is_users_file(frame.f_code.co_filename):
            found = _line_in(frame.f_code, line)
    return found


def module_of(error: BaseException, model: nn.Module) -> str | None:
    """Return the path of the innermost module whose forward an exception has passed through."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            found = names.get(id(frame.f_locals.get(code.co_varnames[0])), found)
    return found


def definition_of(function: object) -> SourceLine | None:
    """Return where a function, or the forward of a module, is defined; None if not in Python."""
    if isinstance(function, nn.Module):
        function = getattr(type(function), "forward", None)  # TorchScript's has none
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None or not is_users_file(code.co_filename):
        return None
    return _line_in(code, code.co_firstlineno)


def _line_in(code: CodeType, line: int) -> SourceLine:
    return SourceLine(code.co_filename, line, code.co_qualname)


def called_by_user() -> bool:
    """Tell whether the innermost frame outside of capture and check is of the user's program."""
    files = (frame.f_code.co_filename for frame in frames())
    return is_users_file(next((f for f in files if not f.startswith(_CAPTURE)), "<none>"))


def compiled_modules(model: nn.Module) -> Iterator[str]:
    """Yield the names of modules that torch.compile has made, or compiled in place."""
    for name, module in model.named_modules():
        call = getattr(module, COMPILED_CALL, None)
        # graphfsdp.capture_in_place has its calls there, too.
        in_place = call is not None and not type(call).__module__.startswith("graphfsdp.in_place")
        if in_place or type(module).__name__ == "OptimizedModule":
            yield name


def has_compiled_regions(model: nn.Module) -> bool:
    return next(compiled_modules(model), None) is not None


def has_compiled() -> bool:
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames") or counters.get("stats"))


def may_compile() -> bool:
    """Tell whether anybody has asked torch for compiled code, which is made when it is called."""
    asked_of: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    # What is to stay uncompiled, as some of torch itself, has no backend.
    return any(map(callable, asked_of.values()))


class ModuleTracker:
    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []

    @property
    def path(self) -> str | None:
        """Full name of the running module, "" for the root, None outside any."""
        return self._stack[-1] if self._stack else None

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        self._stack.append(name)
        try:
            yield
        finally:
            self._stack.pop()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        def enter(module: nn.Module, args: object) -> None:
            name = self._names.get(id(module))
            if name is None:
                name = f"{self._stack[-1] if self._stack else ''}<{type(module).__name__}>"
            self._stack.append(name)

        def leave(module: nn.Module, args: object, output: object) -> None:
            if self._stack:
                self._stack.pop()

        handles = [
            torch_module.register_module_forward_pre_hook(enter),
            torch_module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()


class OpPhase(enum.Enum):
    FORWARD = "forward"  # modules, loss function, and whatever runs with gradients enabled
    BACKWARD = "backward"  # inside a node of autograd, recomputation and gradient hooks included
    OPTIMIZER = "optimizer"  # after a backward pass, gradients disabled: norm, clip, step, EMA


class Site(NamedTuple):
    """One place in the user's program; hashable and cheap to make.

    Attributes:
        phase: Part of the iteration.
        module: Full name of the module, "" for the root, None outside any. In a backward pass
            that of the forward operator whose gradient is computed, or of a parameter's owner.
        code: The user's; in a backward pass that of the forward operator.
        line: In that.
    """

    phase: OpPhase
    module: str | None
    code: CodeType | None
    line: int

    @property
    def source(self) -> SourceLine | None:
        return None if self.code is None else _line_in(self.code, self.line)


class SiteTable:
    """Numbers the sites of a recording; an operator remembers a number.

    Note [Names in a backward pass]: autograd gives its nodes rising sequence numbers. A forward
    operator is dispatched right after its node was made, so the first operator seen under a
    number is the node's, and in the backward pass the running node's number leads back to it.
    """

    def __init__(self, model: nn.Module, tracker: ModuleTracker) -> None:
        self._tracker = tracker
        self._numbers: dict[Site, int] = {}
        self._forward_sites: dict[int, Site] = {}  # by autograd's sequence number
        self._owners = {
            id(param): path
            for path, module in model.named_modules()
            for _, param in nn.Module.named_parameters(module, recurse=False)
        }
        self._is_users: dict[str, bool] = {}  # by file name
        self._ran_backward = False

    def here(self) -> int:
        return self._numbers.setdefault(self._place(), len(self._numbers))

    def sites(self) -> tuple[Site, ...]:
        return tuple(self._numbers)

    def _place(self) -> Site:
        module = self._tracker.path
        node = backward_node()
        if node is not None:
            self._ran_backward = True
            return self._backward_place(node, module)
        if module is not None:
            self._ran_backward = False
        after = self._ran_backward and module is None and not torch.is_grad_enabled()
        place = Site(OpPhase.OPTIMIZER if after else OpPhase.FORWARD, module, *self._users_line())
        self._forward_sites.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        return place

    def _backward_place(self, node: torch.autograd.graph.Node, module: str | None) -> Site:
        if module is not None:  # recomputation runs modules again
            return Site(OpPhase.BACKWARD, module, *self._users_line())
        number = sequence_number(node)
        if number == _NO_SEQUENCE:
            owner = self._owners.get(id(getattr(node, "variable", None)))
            return Site(OpPhase.BACKWARD, owner, None, 0)
        origin = self._forward_sites.get(number)
        if origin is None:
            return Site(OpPhase.BACKWARD, None, None, 0)
        return Site(OpPhase.BACKWARD, origin.module, origin.code, origin.line)

    def _users_line(self) -> tuple[CodeType | None, int]:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            known = self._is_users.get(code.co_filename)
            if known is None:
                known = self._is_users[code.co_filename] = is_users_file(code.co_filename)
            if known:
                return code, frame.f_lineno
            frame = frame.f_back
        return None, 0


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
            members = [each for base in type(mode).__mro__ for each in vars(base).values()]
            # torch puts a function of its own around each __torch_dispatch__.
            members += [each.__wrapped__ for each in members if hasattr(each, "__wrapped__")]
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
