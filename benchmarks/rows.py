"""What measuring programs tell: rows for ``benchmarks.gpu_check``, or of the small architectures.

Those for the check say what was measured, and if it is ok.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.console import Console

from graphfsdp.bench.machine import find_environment
from graphfsdp.bench.results import Row, Table
from graphfsdp.bench.workloads import Case, suite

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
CPU = torch.device("cpu")


def parser_for(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return one with the flags that such programs share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the rows")
    return parser


def tell(rows: Sequence[Row], out: pathlib.Path | None) -> int:
    """Print rows, write them where that was asked for, and return the exit code."""
    for row in rows:
        print(f"{row['what']}: {row['result']}{'' if row['ok'] else ' (not good)'}")
    if out is not None:
        out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


def tell_of_the_zoo(
    name: str,
    title: str,
    measure: Callable[[Case], Row],
    columns: Mapping[str, str],
    facts: Callable[[Sequence[Row]], Row] = lambda _: {},
) -> None:
    """Measure twelve small architectures on a CPU, print a table, and keep it in the results.

    ``columns`` are formats of rows by their headings; ``facts`` are of all rows together.
    """
    torch.set_num_threads(1)
    rows = [measure(case) for case in suite("zoo")]
    cells = [tuple(column.format_map(row) for column in columns.values()) for row in rows]
    Console(width=100).print(Table(title, tuple(columns), cells).rich())
    record = {"environment": find_environment(CPU), **facts(rows), "architectures": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
