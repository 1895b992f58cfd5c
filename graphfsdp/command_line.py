"""Command lines: flags that are the fields of a dataclass, and bad ones reported in one line."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from rich.console import Console

from graphfsdp.errors import ConfigError


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

    ``some_name`` becomes ``--some-name``. Its type says what the flag takes (of a tuple: one or
    more), the text is its help, and what may follow is another spelling, or argparse's metavar, or
    action of a switch that has no ``--no-...``. ``sections`` are titles in the help by the first
    field below each.
    """
    hints = get_type_hints(options, include_extras=True)
    group: Any = parser
    for field in fields(options):
        if field.name in sections:
            group = parser.add_argument_group(sections[field.name])
        if get_origin(hints[field.name]) is Annotated:
            _add_flag(group, field, *get_args(hints[field.name]))


def _add_flag(group: Any, field: Field[Any], kind: Any, explanation: str, *extra: str) -> None:
    names = [flag_name(field.name), *(each for each in extra if each.startswith("--"))]
    special = next((each for each in extra if each not in names), None)
    # "is": 1.0 and 0.0 are defaults too, and equal to True and False.
    is_said = field.default is not None and field.default is not False
    if is_said and field.default not in (MISSING, ""):
        explanation += f" (default: {'on' if field.default is True else field.default})"
    options: dict[str, Any] = {"required": field.default is MISSING, "help": explanation}
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        options["nargs"] = "+"
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    elif kind is bool:
        options["action"] = special or argparse.BooleanOptionalAction
    else:
        metavar = special or {int: "N", float: "X", str: "PATH"}[kind]
        options |= {"type": kind, "metavar": metavar}
    group.add_argument(*names, **options)


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print one line, not wrapped, and with nothing in it taken for markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
