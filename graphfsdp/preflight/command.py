"""``graphfsdp check``: what a graph could not hold of a training program, before it is run."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from graphfsdp.base.hazards import HazardKind
from graphfsdp.command_line import Parser, add_flags, flags_of
from graphfsdp.errors import ConfigError
from graphfsdp.preflight.report import CheckReport
from graphfsdp.preflight.script import ScriptCheck

_EXIT_HAZARDS, _EXIT_NO_CHECK = 1, 2
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
  graphfsdp check --json=hazards.json --ignore gradient train.py
  graphfsdp check --device cpu train_on_gpu.py       # on a machine without a GPU
  graphfsdp check -m my_project.train --steps 10

exit code: 0 no hazard, 1 hazards, 2 the check could not run.
"""


def run_check(arguments: Sequence[str], console: Console) -> int:
    given = _parse(arguments)
    flags = {name: value for name, value in vars(given).items() if name in flags_of(ScriptCheck)}
    how = ScriptCheck(given.ignore, **flags)
    show = _Shows(given.json)
    # The program's own output must not get into JSON that another program reads.
    aside = contextlib.redirect_stdout(sys.stderr) if given.json == "-" else None
    name, *rest = given.target_and_arguments
    if not (given.module or Path(name).is_file()):
        raise ConfigError(f"there is no file {name!r}; expected {_EXPECTED}")
    with aside or contextlib.nullcontext():
        report = how.run_script(name, rest, is_module=given.module, end_process=show.and_end)
    return show(report)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("graphfsdp check", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "--json",
        metavar="=FILE",
        nargs="?",
        const="-",
        default=None,
        help="the report as JSON, to a file (--json=FILE) or, without one, to the standard output",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        choices=[kind.value for kind in HazardKind],
        metavar="KIND",
        help="leave out a kind of hazard, as the report names it; may be given several times",
    )
    add_flags(parser, ScriptCheck, {})
    parser.add_argument(
        "-m", dest="module", action="store_true", default=False, help="the target is a module"
    )
    parser.add_argument(
        "target_and_arguments",
        metavar="SCRIPT.py [ARGUMENT ...]",
        nargs=argparse.REMAINDER,
        help="what to check, and the script's own arguments",
    )
    # A bare --json must not swallow the script's name.
    words = ["--json=-" if word == "--json" else word for word in _ours(arguments)]
    given = parser.parse_args([*words, *arguments[len(words) :]])
    if not given.target_and_arguments:
        raise ConfigError(f"nothing to check; expected {_EXPECTED}")
    return given


def _ours(arguments: Sequence[str]) -> list[str]:
    """Return the words before the target: what follows it belongs to the script."""
    taking = ("--ignore", "--target", "--device", "--limit-s")
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        index += 2 if arguments[index] in taking else 1
    return list(arguments[:index])


class _Shows:
    """Shows a report where it was to be shown when this was made, whatever a script has moved."""

    def __init__(self, json: str | None) -> None:
        self._json = json
        self._path = "" if json is None else os.path.abspath(json)
        self._open, self._out, self._errors = open, sys.stdout, sys.stderr

    def __call__(self, report: CheckReport) -> int:
        """Return the exit code."""
        code = 0 if report.ok else _EXIT_HAZARDS
        if self._json == "-":
            self._out.write(report.to_json_text() + "\n")
            return code
        if self._json is not None:
            try:
                with self._open(self._path, "w", encoding="utf-8") as file:
                    file.write(report.to_json_text() + "\n")
            except OSError as error:  # not exit code 1, which says that there are hazards
                reason = error.strerror or str(error)
                raise ConfigError(f"--json={self._json}: cannot be written ({reason})") from None
        # Of several ranks, those that found something speak, and the first.
        if os.environ.get("LOCAL_RANK", "0") == "0" or not report.ok:
            self._out.write(f"{report}\n")
        return code

    def and_end(self, find: Callable[[], CheckReport]) -> NoReturn:
        """Show what is found, and end the process as it stands."""
        try:
            code = self(find())
        except ConfigError as error:
            self._errors.write(f"error: {error}\n")
            code = _EXIT_NO_CHECK
        self._out.flush()
        self._errors.flush()
        os._exit(code)
