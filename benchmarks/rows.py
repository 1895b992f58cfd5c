"""What a measuring program tells ``benchmarks.gpu_check``: rows that say what, and if it is ok."""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

Row = dict[str, Any]


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
