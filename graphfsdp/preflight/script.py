"""Checks a program that was not written for it: its first captured step, or a function of it."""

import contextlib
import importlib
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphfsdp.base.hazards import HazardKind
from graphfsdp.errors import ConfigError, first_line
from graphfsdp.preconditions import Program
from graphfsdp.preflight.check import check_program
from graphfsdp.preflight.loop import ScriptRun
from graphfsdp.preflight.no_writes import nothing_written
from graphfsdp.preflight.report import CheckReport

_NO_CUDA = ("CUDA", "NVIDIA", "accelerator")


class ScriptError(ConfigError):
    """A program did not get as far as a check; ``cause`` is None if it ended well."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class ScriptCheck:
    """How to check. Each annotated field is a flag (``command_line.add_flags``)."""

    ignore: Sequence[HazardKind | str] = ()
    target: Annotated[
        Literal["cuda", "cpu"],
        "cuda: also what only a GPU would refuse; cpu: what the CPU refuses",
    ] = "cuda"
    device: Annotated[
        Literal["cpu"] | None,
        "give the program the CPU where it asks for a GPU (calls of torch.cuda excepted)",
    ] = None
    limit_s: Annotated[
        float, "stop a script that has not come to its second iteration by then", "SECONDS"
    ] = 600.0

    def run_script(self, name: str, arguments: Sequence[str], *, is_module: bool) -> CheckReport:
        """Run a script up to the first call of its captured step, and check that iteration.

        One that does not call ``graphfsdp.capture`` runs as far as its loop has to be watched.
        """
        run = ScriptRun(self.target, self.ignore)
        folder = "" if is_module else str(Path(name).resolve().parent)
        how = "ran to its end"
        try:
            with (
                _as_program([name, *arguments], folder),
                self._device(),
                nothing_written(),
                run.following(),
                _time_limit(self.limit_s),
            ):
                if is_module:
                    runpy.run_module(name, run_name="__main__", alter_sys=True)
                else:
                    # Python's own `__file__` of a script is absolute, too.
                    runpy.run_path(str(Path(name).absolute()), run_name="__main__")
        except _OverTimeError:
            how = f"was stopped after {self.limit_s:g} seconds"
        except SystemExit as done:
            how = f"ended with exit code {done.code}"
        except Exception as error:  # whatever somebody else's program raises
            if run.report is None:
                _refuse_failure(error, self)
        if run.report is None:
            raise ScriptError(
                f"the program {how} and {run.came_to}. Remedy: let it run two iterations, or write "
                "a function that returns (model, optimizer, batch, loss_fn) and check "
                "MODULE:FUNCTION"
            )
        return run.report

    def run_function(self, name: str) -> CheckReport:
        """Call a function that returns what ``graphfsdp.check`` takes, and check that.

        A batch that is a tuple is the positional arguments, a mapping the keyword arguments,
        anything else the one argument.
        """
        try:
            with _as_program([name], str(Path.cwd())), self._device(), nothing_written():
                made = _arguments_of(_find(name)())
                batch = made.pop("batch")
                args = batch if isinstance(batch, tuple) else (batch,)
                kwargs: Mapping[str, Any] = {}
                if isinstance(batch, Mapping):
                    args, kwargs = (), batch
                how: dict[str, Any] = {"target": self.target, "ignore": self.ignore}
                how |= {key: made.pop(key) for key in how.keys() & made.keys()}
                program = Program.of(made.pop("model"), made.pop("optimizer"), **made)
                return check_program(program, args, kwargs, **how)
        except ScriptError:
            raise
        except Exception as error:  # whatever somebody else's function raises
            _refuse_failure(error, self)

    def _device(self) -> contextlib.AbstractContextManager[object]:
        return cpu_instead() if self.device == "cpu" else contextlib.nullcontext()


class _OverTimeError(BaseException):
    """Ends a script that has not come to a check; nothing that it does catches this by accident."""


@contextlib.contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """End the body after so many seconds."""

    def end(*details: object) -> NoReturn:
        raise _OverTimeError

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def _as_program(argv: list[str], folder: str) -> Iterator[None]:
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", [folder, *sys.path]):
        yield


def _find(name: str) -> Any:
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ScriptError(f"there is no file {place!r}")
        found = runpy.run_path(place, run_name=Path(place).stem).get(attribute)
    else:
        try:
            found = getattr(importlib.import_module(place), attribute, None)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise ScriptError(f"there is no module {place!r} to import from here") from None
    if not callable(found):
        raise ScriptError(f"{place!r} has no function {attribute!r}")
    return found


def _arguments_of(made: object) -> dict[str, Any]:
    names = ("model", "optimizer", "batch", "loss_fn")
    if isinstance(made, Mapping):
        found = dict(made)
    elif isinstance(made, tuple) and len(made) in (3, 4):
        found = dict(zip(names, made, strict=False))
    else:
        found = {}
    missing = [name for name in names[:3] if name not in found]
    if missing:
        raise ScriptError(
            f"the function returned a {type(made).__name__}; expected (model, optimizer, batch), "
            "(model, optimizer, batch, loss_fn), or a mapping with these keys and other arguments "
            "of graphfsdp.check"
        )
    return found


def _refuse_failure(error: Exception, how: ScriptCheck) -> NoReturn:
    message = f"the program failed before a check: {first_line(error)}"
    if any(word in str(error) for word in _NO_CUDA):
        message += (
            ". Remedy: it calls torch.cuda directly, which --device cpu cannot answer; make that "
            "depend on torch.cuda.is_available()"
            if how.device == "cpu"
            else ". Remedy: --device cpu, which gives the program the CPU where it asks for "
            "'cuda'; or choose the device by torch.cuda.is_available()"
        )
    raise ScriptError(message, error) from error


@contextlib.contextmanager
def cpu_instead() -> Iterator[None]:
    """Run a program that is written for a GPU; its GradScaler scales, as it would there."""
    tells = "torch.cuda.amp.common.amp_definitely_not_available"
    with mock.patch(tells, return_value=False), CpuInstead():
        yield


class CpuInstead(TorchFunctionMode):
    """Rewrites ``device="cuda"``, ``.to("cuda")``, ``.cuda()`` and ``.pin_memory()``.

    Calls of torch.cuda itself (streams, events, ``set_device``) go where they always went.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        given = {name: _replaced(value, name) for name, value in (kwargs or {}).items()}
        if func is Tensor.to:
            args = [_replaced(value, "device") for value in args]
        return func(*args, **given)


def _replaced(value: Any, name: str) -> Any:
    if name == "pin_memory":
        return False
    if name != "device":
        return value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cpu")  # the number of a GPU
    return value
