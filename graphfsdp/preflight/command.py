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
  graphfsdp check --json --ignore gradient train.py > hazards.json
  graphfsdp check --device cpu train_on_gpu.py       # on a machine without a GPU
  graphfsdp check -m my_project.train --steps 10

exit code: 0 no hazard, 1 hazards, 2 the check could not run.
"""


def run_check(arguments: Sequence[str], console: Console) -> int:
    given = _parse(arguments)
    flags = {name: value for name, value in vars(given).items() if name in flags_of(ScriptCheck)}
    how = ScriptCheck(given.ignore, **flags)
    name, *rest = given.target_and_arguments
    if not (given.module or Path(name).is_file()):
        raise ConfigError(f"there is no file {name!r}; expected {_EXPECTED}")
    out, errors = sys.stdout, sys.stderr  # whatever the script puts in their place

    def show(report: CheckReport) -> int:
        if given.json:
            out.write(report.to_json_text() + "\n")
        # Of several ranks, those that found something speak, and the first.
        elif os.environ.get("LOCAL_RANK", "0") == "0" or not report.ok:
            out.write(f"{report}\n")
        return 0 if report.ok else _EXIT_HAZARDS

    def show_and_end(find: Callable[[], CheckReport]) -> NoReturn:
        try:
            code = show(find())
        except ConfigError as error:
            errors.write(f"error: {error}\n")
            code = _EXIT_NO_CHECK
        out.flush()
        errors.flush()
        os._exit(code)

    # The program's own output must not get into JSON that another program reads.
    with contextlib.redirect_stdout(errors if given.json else out):
        report = how.run_script(name, rest, is_module=given.module, end_process=show_and_end)
    return show(report)


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
    given = parser.parse_args(arguments)
    if not given.target_and_arguments:
        raise ConfigError(f"nothing to check; expected {_EXPECTED}")
    return given
