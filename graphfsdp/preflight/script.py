"""``graphfsdp check``: what a graph could not hold of a program that was not written for it.

Its first captured step is checked, or its loop in parts.
"""

import argparse
import atexit
import contextlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphfsdp.base.torch_internals import num_function_modes
from graphfsdp.cli import Parser, require
from graphfsdp.errors import ConfigError, HazardKind, first_line
from graphfsdp.in_place import module_part
from graphfsdp.preflight.loop import ScriptRun
from graphfsdp.preflight.no_writes import nothing_written

_EXIT_HAZARDS, _EXIT_NO_CHECK = 1, 2
_NO_CUDA = ("CUDA", "_cuda", "NVIDIA", "accelerator")
# So long a program may take to end by itself.
_GRACE_S = 60.0
_EXPECTED = "SCRIPT.py or -m MODULE"
_DESCRIPTION = """\
Run one training iteration under the rules of a capture and report everything that a graph
cannot hold: host reads, shapes that depend on data, numbers that would be frozen, ... Each with
the line of your program, the reason and the remedy. No file is written: what the script writes
goes to a folder that is gone afterwards.

A SCRIPT.py that calls graphfsdp.capture runs up to the first call of that step, which is judged.
Another one runs unchanged for some iterations, by graphfsdp.capture_in_place: which modules are
captured is said, and why others are not. The script ends there (its `finally` blocks and context
managers run).
"""
_EPILOG = """\
examples:
  graphfsdp check train.py --config small.toml
  graphfsdp check --json --ignore gradient train.py > hazards.json
  graphfsdp check --device cpu train_on_gpu.py       # on a machine without a GPU
  graphfsdp check -m my_project.train --steps 10

exit code: 0 no hazard, 1 hazards, 2 the check could not run.
"""


def run_check(arguments: Sequence[str], console: Console) -> int:
    """Run a script up to the first call of its captured step, and check that iteration.

    One that does not call ``graphfsdp.capture`` runs as far as its loop has to be watched.
    """
    given = _parse(arguments)
    name = given.target_and_arguments[0]
    if not (given.module or Path(name).is_file()):
        raise ConfigError(f"there is no file {name!r}; expected {_EXPECTED}")
    run = ScriptRun(given.target)
    out, errors = sys.stdout, sys.stderr  # whatever the script puts in their place

    def show(how_it_ended: str) -> int:
        report = run.found(how_it_ended).without(set(map(HazardKind, given.ignore)))
        if given.json:
            out.write(report.to_json_text() + "\n")
        # Of several ranks, those that found something speak, and the first.
        elif os.environ.get("LOCAL_RANK", "0") == "0" or not report.ok:
            out.write(f"{report}\n")
        return 0 if report.ok else _EXIT_HAZARDS

    def give_up() -> NoReturn:
        try:
            code = show(f"did not end after {given.limit_s:g} seconds")
        except ConfigError as error:
            errors.write(f"error: {error}\n")
            code = _EXIT_NO_CHECK
        out.flush()
        errors.flush()
        os._exit(code)

    with contextlib.ExitStack() as stack:
        # The program's own output must not get into JSON that another program reads.
        stack.enter_context(contextlib.redirect_stdout(errors if given.json else out))
        if given.device == "cpu":
            stack.enter_context(_cpu_instead())
        stack.enter_context(nothing_written())
        how_it_ended = _run(given, run, give_up)
    return show(how_it_ended)


def _run(given: argparse.Namespace, run: ScriptRun, give_up: Callable[[], NoReturn]) -> str:
    """Run a program; return in which way it ended."""
    name = given.target_and_arguments[0]
    folder = "" if given.module else str(Path(name).resolve().parent)
    try:
        with (
            _as_program(given.target_and_arguments, folder),
            run.following(),
            _time_limit(given.limit_s, run.is_to_end, give_up),
        ):
            if given.module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                # Python's own `__file__` of a script is absolute, too.
                runpy.run_path(str(Path(name).absolute()), run_name="__main__")
    except _OverTimeError:
        return f"was stopped after {given.limit_s:g} seconds"
    except SystemExit as done:
        return f"ended with exit code {done.code}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever somebody else's program raises
        if run.report is None:
            _refuse_failure(error, given.device)
    return "ran to its end"


class _OverTimeError(BaseException):
    """Ends a script that has not come to a check; nothing that it does catches this by accident."""


@contextlib.contextmanager
def _time_limit(
    limit_s: float, is_to_end: threading.Event, give_up: Callable[[], NoReturn]
) -> Iterator[None]:
    """End the body after so many seconds; ``give_up`` where it catches that, or waits in C."""
    is_over = threading.Event()

    def end(*details: object) -> NoReturn:
        raise _OverTimeError

    def watch() -> None:
        is_to_end.wait(limit_s)
        if not is_over.wait(_GRACE_S):
            give_up()

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        is_to_end.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def _as_program(argv: list[str], folder: str) -> Iterator[None]:
    """Run the body as Python would run a program; streams and folder are then what they were.

    What it leaves for Python's exit is left out, since nobody leads its files aside then; its
    threads end with the process, whatever they do.
    """
    patches: dict[str, Any] = {"argv": argv, "path": [folder, *sys.path]}
    patches |= {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr", "excepthook")}
    start = threading.Thread.start

    def register(function: Callable[..., object], *_: Any, **__: Any) -> Callable[..., object]:
        return function

    def start_for_now(thread: threading.Thread) -> None:
        thread.daemon = True
        start(thread)

    with (
        mock.patch.multiple(sys, **patches),
        contextlib.chdir(os.getcwd()),
        mock.patch.object(atexit, "register", register),
        mock.patch.object(threading.Thread, "start", start_for_now),
    ):
        yield


def _refuse_failure(error: BaseException, device: str | None) -> NoReturn:
    traceback.print_exception(error)
    message = f"the program failed before a check: {first_line(error)}"
    if any(word in message for word in _NO_CUDA):
        message += (
            ". Remedy: it calls torch.cuda directly, which --device cpu cannot answer; make that "
            "depend on torch.cuda.is_available()"
            if device == "cpu"
            else ". Remedy: --device cpu, which gives the program the CPU where it asks for "
            "'cuda'; or choose the device by torch.cuda.is_available()"
        )
    raise ConfigError(message) from error


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("graphfsdp check", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "--json",
        action="store_true",
        default=False,
        help="the report as JSON; the script's own output goes to the standard error",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        choices=[kind.value for kind in HazardKind],
        metavar="KIND",
        help="leave out a kind of hazard, as the report names it; may be given several times",
    )
    parser.add_argument(
        "--target",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cuda: also what only a GPU would refuse; cpu: what the CPU refuses (default: cuda)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu"],
        default=None,
        help="give the program the CPU where it asks for a GPU (calls of torch.cuda excepted)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="stop a script that has not come to its end by then (default: 600.0)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", default=False, help="the target is a module"
    )
    parser.add_argument(
        "target_and_arguments",
        metavar="SCRIPT.py [ARGUMENT ...]",
        nargs=argparse.REMAINDER,
        help="what to check, and the script's own arguments",
    )
    given = parser.parse_args(arguments)
    if not given.target_and_arguments:
        raise ConfigError(f"nothing to check; expected {_EXPECTED}")
    in_range = 0 < given.limit_s < threading.TIMEOUT_MAX / 2
    require("limit_s", given.limit_s, in_range, "greater than 0, and a time that can pass")
    return given


@contextlib.contextmanager
def _cpu_instead() -> Iterator[None]:
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
        _CpuMode(),
    ):
        yield


class _CpuMode(TorchFunctionMode):
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
