"""``graphfsdp bench compare A B``: two results as a table, as JSON, and as a gate for CI."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphfsdp.bench.compare import DEFAULT_TOLERANCE, compare
from graphfsdp.bench.comparison import Change, Comparison, Side, Verdict
from graphfsdp.bench.record_files import read_result, to_json
from graphfsdp.bench.records import REFERENCE
from graphfsdp.errors import ConfigError

EXIT_REGRESSION = 1
_WIDTH = 160  # of a file or a pipe
_STYLES = (
    (Verdict.SLOWER, "bold red"),
    (Verdict.LOST, "bold red"),
    (Verdict.FASTER, "green"),
    (Verdict.UNCLEAR, "yellow"),
)


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag as every other bad input is reported: one line, no usage block."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; '{self.prog} --help' lists every flag")


def run_compare(arguments: Sequence[str], console: Console) -> int:
    """Compare two results and print what has changed.

    Args:
        arguments: What follows ``graphfsdp bench compare``.
        console: Where to print.

    Returns:
        1 if something has become slower, no longer runs or is no longer bit-exact, else 0.

    Raises:
        ConfigError: a file is no result, or the two cannot be compared.
    """
    options = _make_parser().parse_args(arguments)
    found = compare(
        read_result(options.old),
        read_result(options.new),
        tolerance=options.tolerance,
        base=options.base,
        other_machine=options.other_machine,
    )
    if options.json is not None:
        try:
            Path(options.json).write_text(to_json(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {options.json} cannot be written: {error}") from None
    wide = None if console.is_terminal else max(console.width, _WIDTH)
    _print(found, Console(file=console.file, width=wide))
    return EXIT_REGRESSION if found.regressions else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="graphfsdp bench compare",
        description="Compare two results of graphfsdp bench by how many times as fast as eager "
        "each contender was: a ratio inside each result, which the hour of the day and the clock "
        "of the machine leave alone. Ends with 1 if something has become slower by more than the "
        "tolerance and the ratio's 95 % interval leaves 1 out, if a contender no longer runs, or "
        "if its losses are no longer bit-exact.",
        allow_abbrev=False,
    )
    parser.add_argument("old", metavar="A", help="result.json or result directory: what was")
    parser.add_argument("new", metavar="B", help="the same: what is")
    parser.add_argument(
        "--tolerance", type=float, default=DEFAULT_TOLERANCE, metavar="X",
        help="part of a speed-up that may be lost (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--base", default=REFERENCE, metavar="NAME",
        help="contender that speed-ups are of (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--other-machine", action="store_true",
        help="compare ratios of different machines, too",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write everything there as JSON")
    return parser


def _print(found: Comparison, console: Console) -> None:
    table = Table(title=f"times as fast as {found.base}, median (smallest to largest) of rounds")
    table.add_column("case")
    table.add_column("contender")
    for name in ("A", "B", "B over A", "95 % interval", "memory A, B"):
        table.add_column(name, justify="right")
    if found.same_machine:
        table.add_column("ms A, B", justify="right")
    table.add_column("verdict")
    for change in found.changes:
        table.add_row(*_row(change, times=found.same_machine))
    console.print(table)
    for name, what in found.environment.items():
        _line(console, f"{name}: {what}")
    for keys, which in ((found.only_old, "A"), (found.only_new, "B")):
        if keys:
            _line(console, f"only in {which}: {', '.join(keys)}")
    for change in found.changes:
        if change.reason:
            _line(console, f"{change.contender} no longer runs: {change.reason}")
    num_unclear = sum(change.verdict is Verdict.UNCLEAR for change in found.changes)
    if num_unclear:
        _line(
            console,
            f"{num_unclear} unclear: the rounds scatter more than what has changed; measure "
            "longer, or on a quiet machine",
        )
    num_regressions = len(found.regressions)
    if num_regressions:
        _line(console, f"{num_regressions} of {len(found.changes)} contenders are worse")
    else:
        clearly = "clearly " if num_unclear else ""
        _line(console, f"nothing is {clearly}worse (tolerance {found.tolerance:.0%})")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _row(change: Change, *, times: bool) -> list[str | Text]:
    old, new = change.old, change.new
    interval = "" if change.low is None else f"{change.low:.3f} to {change.high:.3f}"
    verdict: str = change.verdict.value
    if change.lost_bits:
        verdict += ", no longer bit-exact"
    style = next((style for which, style in _STYLES if which is change.verdict), "")
    if change.is_regression:
        style = "bold red"
    return [
        change.case,
        change.contender,
        _speedup(old),
        _speedup(new),
        "" if change.ratio is None else f"{change.ratio:.3f}",
        interval,
        f"{_memory(old)}, {_memory(new)}",
        *([f"{_ms(old)}, {_ms(new)}"] if times else []),
        Text(verdict, style=style),
    ]


def _speedup(side: Side | None) -> str:
    return "-" if side is None else f"{side.speedup}"


def _memory(side: Side | None) -> str:
    return "-" if side is None or side.memory_ratio is None else f"{side.memory_ratio:.2f}"


def _ms(side: Side | None) -> str:
    return "-" if side is None else f"{side.step_ms:.4g}"
