"""Checks a program that was not written for it: its first captured step, or its loop in parts."""

import atexit
import contextlib
import os
import runpy
import signal
import sys
import threading
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
from graphfsdp.preflight.loop import ScriptRun
from graphfsdp.preflight.no_writes import nothing_written
from graphfsdp.preflight.report import CheckReport

_NO_CUDA = ("CUDA", "_cuda", "NVIDIA", "accelerator")
# So long a program may take to end by itself.
_GRACE_S = 60.0


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
    limit_s: Annotated[float, "stop a script that has not come to its end by then", "SECONDS"] = (
        600.0
    )

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
            end_process(lambda: run.found(f"did not end after {self.limit_s:g} seconds"))

        try:
            with (
                _as_program([name, *arguments], folder),
                self._device(),
                nothing_written(),
                _no_exits(),
                run.following(),
                _time_limit(self.limit_s, run, give_up),
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
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever somebody else's program raises
            if run.report is None:
                _refuse_failure(error, self)
        return run.found(how)

    def _device(self) -> contextlib.AbstractContextManager[object]:
        return cpu_instead() if self.device == "cpu" else contextlib.nullcontext()


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
def _no_exits() -> Iterator[None]:
    """Leave out what the body leaves for Python's exit, when nobody leads its files aside.

    Its threads end with the process, whatever they do.
    """
    start = threading.Thread.start

    def register(function: Callable[..., object], *_: Any, **__: Any) -> Callable[..., object]:
        return function

    def start_for_now(thread: threading.Thread) -> None:
        thread.daemon = True
        start(thread)

    with (
        mock.patch.object(atexit, "register", register),
        mock.patch.object(threading.Thread, "start", start_for_now),
    ):
        yield


def _refuse_failure(error: BaseException, how: ScriptCheck) -> NoReturn:
    traceback.print_exception(error)
    message = f"the program failed before a check: {first_line(error)}"
    if any(word in message for word in _NO_CUDA):
        message += (
            ". Remedy: it calls torch.cuda directly, which --device cpu cannot answer; make that "
            "depend on torch.cuda.is_available()"
            if how.device == "cpu"
            else ". Remedy: --device cpu, which gives the program the CPU where it asks for "
            "'cuda'; or choose the device by torch.cuda.is_available()"
        )
    raise ConfigError(message) from error


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
