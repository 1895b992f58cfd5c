"""Where in the user's program an operation comes from: module path and source line."""

import inspect
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from graphfsdp import errors
from graphfsdp.base.hazards import SourceLine

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(inspect.getfile(errors)).parent
_CAPTURE = (str(Path(__file__).parents[1]), str(_PACKAGE / "_capture"))
# The trainer's models and scripts are a user's code as far as an error message goes.
_OURS = (
    *_CAPTURE,
    *(str(_PACKAGE / folder) for folder in ("base", "optim", "preflight", "sharding")),
    *(str(_PACKAGE.parent / folder) for folder in ("capture", "optim")),
)
_SKIPPED = (_TORCH, *_OURS)
_PYTHON = sysconfig.get_path("stdlib")  # contextlib, copy and the like only pass calls on
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def is_users_file(file: str) -> bool:
    """Tell whether a code object's file is neither torch's, nor Python's, nor ours."""
    if file.startswith("<") or file.startswith(_SKIPPED):
        return False
    if file.startswith(_PYTHON) and not file.startswith(_INSTALLED):
        return False
    return str(Path(file).parent) != str(_PACKAGE)


def is_installed_file(file: str) -> bool:
    """Tell whether a code object's file belongs to an installed package."""
    return file.startswith(_INSTALLED)


def user_source_line() -> SourceLine | None:
    """Return the innermost line of the running program that is neither torch's nor ours."""
    return _innermost(None)


def user_line_in_backward() -> SourceLine | None:
    """Return the innermost such line within autograd's engine: of a hook or a custom backward."""
    return _innermost("_engine_run_backward")


def _innermost(end: str | None) -> SourceLine | None:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != end:
        if is_users_file(frame.f_code.co_filename):
            code = frame.f_code
            return SourceLine(code.co_filename, frame.f_lineno, code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def user_line_of(error: BaseException) -> SourceLine | None:
    """Return the innermost line of the user's program that an exception has passed through."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users_file(code.co_filename):
            found = SourceLine(code.co_filename, trace.tb_lineno, code.co_qualname)
        trace = trace.tb_next
    return found


def definition_of(function: object) -> SourceLine | None:
    """Return where a function, or the forward of a module, is defined; None if not in Python."""
    if isinstance(function, nn.Module):
        function = type(function).forward
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None or not is_users_file(code.co_filename):
        return None
    return SourceLine(code.co_filename, code.co_firstlineno, code.co_qualname)


def called_by_user() -> bool:
    """Tell whether the innermost frame outside the capture leg is one of the user's program."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_CAPTURE):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and is_users_file(frame.f_code.co_filename)


class ModuleTracker:
    """Knows the full name of the module whose forward is running."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []

    @property
    def path(self) -> str | None:
        """Full name of the running module, "" for the root, None outside any."""
        return self._stack[-1] if self._stack else None

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Follow forward calls while the body runs."""

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
