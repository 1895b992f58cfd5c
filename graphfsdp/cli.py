"""The command line: ``graphfsdp COMMAND ...``, also as ``python -m graphfsdp COMMAND ...``.

Flags are the fields of a dataclass, and bad ones are reported in one line.
"""

import argparse
import io
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import torch
from rich.console import Console

import graphfsdp
from graphfsdp.errors import ConfigError, GraphFSDPError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended
# A launcher ends all processes when one has ended: the first one needs time to say why.
_SAY_FIRST_S = 5.0
# Its Ctrl-C reaches one process after the other, and a rank may hear of it from another one first.
_INTERRUPTED_RANK = re.compile(r"rank \d+ of \d+ failed in [^:]*: KeyboardInterrupt")


# What each is for, and the function that takes its arguments and a console and returns an exit code
# other than 0; imported late, since one command is much to import for another one's help.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "train": ("train a GPT with the whole iteration in one graph", "training.loop:run_train"),
        "bench": (
            "measure what the capture brings, beside what people use instead",
            "bench.command:run_bench",
        ),
        "plan": (
            "tell what each rank of a training run will need, without the ranks",
            "planning.plan:run_plan",
        ),
        "check": (
            "tell what a graph could not hold of a training program",
            "preflight.script:run_check",
        ),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 done; 1 failed, hazards or differences found; 2 bad input; 130 interrupted.

    Of several processes that a launcher has started, the first on each machine tells of bad
    input and interruption, which are common to all. A failure may be one rank's alone, so that
    rank tells of it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # of an encoding without such letters
    errors = Console(stderr=True, quiet=not speaks)
    try:
        code = _dispatch(arguments)
        _flush()
        return code
    except SystemExit as done:  # argparse, after printing a help
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        return _tell_of_interrupt(errors)
    except ConfigError as error:
        print_line(errors, f"error: {' '.join(str(error).split())}")
        if not speaks:
            time.sleep(_SAY_FIRST_S)
        return EXIT_BAD_INPUT
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        _complain_of_rank(f"{reason}; try a smaller --micro-batch-size or --bf16")
        return EXIT_FAILED
    except (GraphFSDPError, OSError) as error:
        if _INTERRUPTED_RANK.search(str(error)):
            return _tell_of_interrupt(errors)
        _complain_of_rank(str(error))
        return EXIT_FAILED


def _flush() -> None:
    """Write what is left; nothing, where the reader has left, as ``head`` does."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # which Python would tell of when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell_of_interrupt(errors: Console) -> int:
    before = None
    if threading.current_thread() is threading.main_thread():
        # Behind the terminal's Ctrl-C comes that of a launcher, in the middle of this line.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        print_line(errors, "interrupted; what was logged so far is kept")
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    return EXIT_INTERRUPTED


def _dispatch(arguments: list[str]) -> int:
    commands = "\n".join(f"  {name:<10} {summary}" for name, (summary, _) in COMMANDS.items())
    about = f"commands:\n{commands}\n\n'graphfsdp COMMAND --help' lists a command's flags"
    parser = Parser("graphfsdp", usage="graphfsdp COMMAND ...", description=about)
    version = f"graphfsdp {graphfsdp.__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    command = parser.parse_args(arguments[:1]).command
    run = resolve_name(f"graphfsdp.{COMMANDS[command][1]}")
    return run(arguments[1:], Console()) or 0


def _complain_of_rank(text: str) -> None:
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    prefix = f"rank {os.environ.get('RANK', '?')}: " if several else ""
    print_line(Console(stderr=True), f"{prefix}error: {text}")


class Parser(argparse.ArgumentParser):
    """Reports a bad flag as every other bad input is reported: one line, no usage block.

    A flag that is not given leaves no trace in the result.
    """

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(
            prog=prog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; '{self.prog} --help' lists every flag")


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def require(field: str, value: float, holds: bool, expected: str) -> None:
    """Refuse a number that is not finite, or does not hold what is expected of its flag."""
    if not holds or not math.isfinite(value):
        raise ConfigError(f"{flag_name(field)} must be {expected}, got {value}")


def flags_of(options: type[Any]) -> list[str]:
    """Return the fields of a dataclass that are flags: the annotated ones."""
    hints = get_type_hints(options, include_extras=True)
    return [each.name for each in fields(options) if get_origin(hints[each.name]) is Annotated]


def add_flags(
    parser: argparse.ArgumentParser, options: type[Any], sections: Mapping[str, str]
) -> None:
    """Add a flag for each annotated field of a dataclass.

    ``some_name`` becomes ``--some-name``. Its type says what the flag takes (of a list: one or
    more), the text is its help, and what may follow is another spelling, or argparse's metavar, or
    action of a switch that has no ``--no-...``, or a tuple of choices. ``sections`` are titles in
    the help by the first field below each.
    """
    hints = get_type_hints(options, include_extras=True)
    group: Any = parser
    for field in fields(options):
        if field.name in sections:
            group = parser.add_argument_group(sections[field.name])
        if get_origin(hints[field.name]) is Annotated:
            _add_flag(group, field, *get_args(hints[field.name]))


def _add_flag(group: Any, field: Field[Any], kind: Any, explanation: str, *extra: Any) -> None:
    words = [each for each in extra if isinstance(each, str)]
    names = [flag_name(field.name), *(each for each in words if each.startswith("--"))]
    special = next((each for each in words if each not in names), None)
    # "is": 1.0 and 0.0 are defaults too, and equal to True and False.
    is_said = field.default is not None and field.default is not False
    if is_said and field.default not in (MISSING, ""):
        explanation += f" (default: {'on' if field.default is True else field.default})"
    options: dict[str, Any] = {"required": field.default is MISSING, "help": explanation}
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    if get_origin(kind) is list:
        options["nargs"] = "+"
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    elif kind is bool:
        options["action"] = special or argparse.BooleanOptionalAction
    else:
        metavar = special or {int: "N", float: "X", str: "PATH"}[kind]
        choices = next((each for each in extra if isinstance(each, tuple)), None)
        options |= {"type": kind, "metavar": metavar, "choices": choices}
    group.add_argument(*names, **options)


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print one line, not wrapped, and with nothing in it taken for markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
