"""What measuring programs tell: rows for ``benchmarks.gpu_check``, or of small architectures."""

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Sequence

import torch

from graphfsdp.bench.results import Row, find_environment
from graphfsdp.bench.workloads import SUITES, Case

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
CPU = torch.device("cpu")


def parser_for(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return one with the flags that programs of the check share."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=about)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the rows")
    return parser


def tell(rows: Sequence[Row], out: pathlib.Path | None) -> int:
    """Print what was measured and if it is ok, or write it; return the exit code."""
    text = json.dumps({"rows": rows}, indent=1)
    if out is None:
        print(text)
    else:
        out.write_text(text)
    return 0 if all(row["ok"] for row in rows) else 1


def measure_zoo(name: str, measure: Callable[[Case], Row], ratio: str) -> None:
    """Print of twelve small architectures what is measured on a CPU, and keep it in the results.

    ``ratio`` is the key of which the geometric mean is kept too.
    """
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in SUITES["zoo"]:
        rows.append({"name": case.workload.name, **measure(case)})
        print(rows[-1], flush=True)
    mean = statistics.geometric_mean(row[ratio] for row in rows)
    print(f"{ratio}: {mean:.3f} as geometric mean")
    record = {"environment": find_environment(CPU), "mean": mean, "architectures": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
