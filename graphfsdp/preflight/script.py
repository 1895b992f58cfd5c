"""Checks a program that was not written for it: its first captured step, or a function of it."""

import atexit
import contextlib
import importlib
import importlib.util
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphfsdp.base.hazards import HazardKind
from graphfsdp.base.torch_internals import num_function_modes
from graphfsdp.command_line import require
from graphfsdp.errors import ConfigError, first_line
from graphfsdp.in_place import module_part
from graphfsdp.preconditions import Program
from graphfsdp.preflight.check import check_program
from graphfsdp.preflight.loop import ScriptRun
from graphfsdp.preflight.no_writes import nothing_written
from graphfsdp.preflight.report import CheckReport

_NO_CUDA = ("CUDA", "_cuda", "NVIDIA", "accelerator")
# So long a program may take to end by itself, its threads behind it.
_GRACE_S = 60.0
_THREADS_S = 5.0


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

    def __post_init__(self) -> None:
        in_range = 0 < self.limit_s < threading.TIMEOUT_MAX / 2
        require("limit_s", self.limit_s, in_range, "greater than 0, and a time that can pass")

    def run_script(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        is_module: bool,
        end_process: Callable[[Callable[[], CheckReport]], object],
    ) -> CheckReport:
        """Run a script up to the first call of its captured step, and check that iteration.

        One that does not call ``graphfsdp.capture`` runs as far as its loop has to be watched.
        ``end_process`` is handed what would be returned, where the script does not let itself be
        ended.
        """
        run = ScriptRun(self.target, self.ignore)
        folder = "" if is_module else str(Path(name).resolve().parent)
        how = "ran to its end"

        def give_up() -> None:
            end_process(lambda: _found_by(run, f"did not end after {self.limit_s:g} seconds"))

        try:
            with (
                _as_program([name, *arguments], folder),
                self._device(),
                nothing_written(),
                _its_exits(),
                run.following(),
                _time_limit(self.limit_s, run, give_up),
            ):
                if is_module:
                    _refuse_no_module(name)
                    runpy.run_module(name, run_name="__main__", alter_sys=True)
                else:
                    # Python's own `__file__` of a script is absolute, too.
                    runpy.run_path(str(Path(name).absolute()), run_name="__main__")
        except _OverTimeError:
            how = f"was stopped after {self.limit_s:g} seconds"
        except SystemExit as done:
            how = f"ended with exit code {done.code}"
        except (KeyboardInterrupt, ScriptError):
            raise
        except BaseException as error:  # whatever somebody else's program raises
            if run.report is None:
                _refuse_failure(error, self)
        return _found_by(run, how)

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


def _found_by(run: ScriptRun, how: str) -> CheckReport:
    """Return the report of a program that has ended; ``how``: in which way."""
    if run.report is None:
        raise ScriptError(
            f"the program {how} and {run.came_to}. Remedy: let it run two iterations, or write "
            "a function that returns (model, optimizer, batch, loss_fn) and check "
            "MODULE:FUNCTION"
        )
    return run.report


class _OverTimeError(BaseException):
    """Ends a script that has not come to a check; nothing that it does catches this by accident."""


@contextlib.contextmanager
def _time_limit(limit_s: float, run: ScriptRun, give_up: Callable[[], object]) -> Iterator[None]:
    """End the body after so many seconds; ``give_up`` where it catches that, or waits in C."""
    is_over = threading.Event()

    def end(*details: object) -> NoReturn:
        raise _OverTimeError

    def watch() -> None:
        run.is_to_end.wait(limit_s)
        if not is_over.wait(_GRACE_S):
            give_up()

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        run.is_to_end.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def _as_program(argv: list[str], folder: str) -> Iterator[None]:
    """Run the body as Python would run a program; streams and folder are then what they were."""
    patches: dict[str, Any] = {"argv": argv, "path": [folder, *sys.path]}
    patches |= {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr", "excepthook")}
    with mock.patch.multiple(sys, **patches), contextlib.chdir(os.getcwd()):
        yield


@contextlib.contextmanager
def _its_exits() -> Iterator[None]:
    """Have what the body leaves for Python's exit happen when it ends, where files are led aside.

    Its threads end with the process, some seconds later, whatever they do.
    """
    calls: list[tuple[Callable[..., object], Any, Any]] = []
    threads: list[threading.Thread] = []
    start, unregister = threading.Thread.start, atexit.unregister

    def note(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[..., object]:
        calls.append((function, args, kwargs))
        return function

    def forget(function: Callable[..., object]) -> None:
        calls[:] = [each for each in calls if each[0] != function]
        unregister(function)

    def start_for_now(thread: threading.Thread) -> None:
        if not thread.daemon:
            threads.append(thread)
            thread.daemon = True
        start(thread)

    try:
        with (
            mock.patch.object(atexit, "register", note),
            mock.patch.object(atexit, "unregister", forget),
            mock.patch.object(threading.Thread, "start", start_for_now),
        ):
            yield
    finally:
        while calls:
            function, args, kwargs = calls.pop()
            try:
                function(*args, **kwargs)
            except Exception:  # Python goes on with the next one, too
                traceback.print_exc()
        until = time.monotonic() + _THREADS_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def _refuse_no_module(name: str) -> None:
    """Refuse what ``python -m`` would not find."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ScriptError(f"there is no module {name!r} to run from here")


def _find(name: str) -> Any:
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ScriptError(f"{name!r} names no module; expected MODULE:FUNCTION")
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


def _refuse_failure(error: BaseException, how: ScriptCheck) -> NoReturn:
    message = f"the program failed before a check: {first_line(error)}"
    if any(word in message for word in _NO_CUDA):
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
    autocast = torch.autocast.__init__

    def on_cpu(mode: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(mode, _replaced(device_type, "device"), *args, **kwargs)

    def num_others() -> int:  # below which a module runs as written
        return max(0, num_function_modes() - 1)

    with (
        mock.patch(tells, return_value=False),
        mock.patch.object(torch.autocast, "__init__", on_cpu),
        mock.patch.object(module_part, "num_function_modes", num_others),
        CpuInstead(),
    ):
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
