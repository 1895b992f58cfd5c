"""What is measured of small architectures: ``guard_cost``, ``in_place``."""

import json
import pathlib
import statistics
from collections.abc import Callable

import torch

from graphfsdp.bench.machine import find_environment
from graphfsdp.bench.results import Row
from graphfsdp.bench.workloads import Case, suite

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
CPU = torch.device("cpu")


def measure_zoo(name: str, measure: Callable[[Case], Row], ratio: str) -> None:
    """Print of twelve small architectures what is measured on a CPU, and keep it in the results.

    ``ratio`` is the key of which the geometric mean is kept too.
    """
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in suite("zoo"):
        rows.append({"name": case.workload.name, **measure(case)})
        print(rows[-1], flush=True)
    mean = statistics.geometric_mean(row[ratio] for row in rows)
    print(f"{ratio}: {mean:.3f} as geometric mean")
    record = {"environment": find_environment(CPU), "mean": mean, "architectures": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
