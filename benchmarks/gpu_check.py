"""What a machine with a GPU has to say: tests, parity, the benchmark; `make gpu-check`.

Runs from a bare checkout with nothing but torch, pytest, hypothesis and rich, prints one table
and writes one JSON file into the directory that OUT names (default benchmarks/results). A part
that fails does not stop the others. ``--device cpu`` rehearses it on a machine without a GPU.

Exit code: 0 all is well, 1 something failed, 2 there is no CUDA device.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import environment
from benchmarks.gpu_bench import bench_part
from benchmarks.suite import run_suite

# Those of benchmarks.gpu_parts, which is not imported here: a package that cannot be imported
# is something to report.
PART_NAMES = (
    "parity-fp32",
    "parity-bf16",
    "optimizer",
    "overlap",
)
# Last, since it takes what the others leave, up to its own limit.
BENCH = "bench"
TOTAL_LIMIT_S = 580
SUITE_LIMIT_S = 260
PART_LIMIT_S = 90
BENCH_LIMIT_S = 360
MAX_CHARACTERS = 6000


def suite_part(paths: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run the tests and return them as a part."""
    result = run_suite(paths, limit_s)
    good = not result.num_failed and result.num_passed > 0 and result.error is None
    text = f"{result.num_passed} passed, {result.num_failed} failed, {result.num_skipped} skipped"
    rows = [{"what": "pytest " + " ".join(paths), "result": text, "ok": good}]
    rows += [
        {"what": name, "result": last_line(text), "ok": False}
        for name, text in result.failures.items()
    ]
    return {"rows": rows, "error": result.error, "data": asdict(result)}


def last_line(text: str) -> str:
    """Return the line of a traceback that says what happened."""
    lines = [line for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or [""])[0 if marked else -1][:200]


def child_part(name: str, device: torch.device, limit_s: float) -> dict[str, Any]:
    """Run a part in a process of its own; whatever becomes of it, return a part."""
    command = [sys.executable, "-m", "benchmarks.gpu_parts", name, str(device)]
    try:
        result = subprocess.run(
            command,
            cwd=environment.ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = late.stderr or b""
        tail = (said if isinstance(said, str) else said.decode(errors="replace"))[-MAX_CHARACTERS:]
        return {"rows": [], "error": f"stopped after {limit_s:.0f} s\n{tail}"}
    try:
        document: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        tail = (result.stdout + result.stderr)[-MAX_CHARACTERS:]
        return {"rows": [], "error": f"the process ended with {result.returncode}\n{tail}"}
    return document


def table_of(document: dict[str, Any]) -> Table:
    """Return everything for a terminal."""
    facts = document["environment"]
    versions = f"torch {facts['torch']}, Triton {facts['triton']}, Python {facts['python']}"
    driver = f", driver {facts['driver']}" if facts["gpu"] else ""
    title = f"graphfsdp on {facts['gpu'] or facts['cpu']}{driver}, {versions}, {facts['date']}"
    table = Table(title=title)
    table.add_column("part", no_wrap=True)
    table.add_column("what")
    table.add_column("result")
    table.add_column("good")
    for part in document["parts"]:
        for row in part["rows"]:
            mark = "[green]yes" if row["ok"] else "[red]no"
            table.add_row(part["name"], escape(row["what"]), escape(row["result"]), mark)
        if part["error"]:
            table.add_row(part["name"], "", escape(last_line(part["error"])), "[red]no")
        table.add_section()
    return table


def check(
    device: torch.device, names: Sequence[str], test_paths: Sequence[str], path: pathlib.Path
) -> dict[str, Any]:
    """Run the parts one after the other; the file is complete after each of them."""
    deadline = time.monotonic() + TOTAL_LIMIT_S
    document: dict[str, Any] = {
        "kind": "gpu_check",
        "environment": environment.describe(device),
        "ok": False,
        "parts": [],
    }
    for name in names:
        start = time.monotonic()
        left = deadline - start
        if left < 10:
            part: dict[str, Any] = {"rows": [], "error": f"left out: {TOTAL_LIMIT_S} s are over"}
        elif name == "tests":
            part = suite_part(test_paths, min(SUITE_LIMIT_S, left))
        elif name == BENCH:
            part = bench_part(device, min(BENCH_LIMIT_S, left), path.parent)
        else:
            part = child_part(name, device, min(PART_LIMIT_S, left))
        good = part["error"] is None and all(row["ok"] for row in part["rows"])
        seconds = round(time.monotonic() - start, 1)
        document["parts"].append({"name": name, "ok": good, "seconds": seconds, **part})
        document["ok"] = len(document["parts"]) == len(names) and all(
            part["ok"] for part in document["parts"]
        )
        path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, write."""
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ("tests", *PART_NAMES, BENCH)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=names, action="append", help="a part; repeatable")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what pytest runs")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print(
            "gpu-check needs a CUDA device and torch sees none here. Run it on a machine with a "
            "GPU, or rehearse it: python3 -m benchmarks.gpu_check --device cpu",
            soft_wrap=True,
        )
        return 2
    device = torch.device(options.device)
    facts = environment.describe(device)
    name = f"gpu_check_{environment.slug(str(facts['gpu'] or 'cpu'))}_{facts['date']}.json"
    path = environment.output_directory() / name
    document = check(device, options.part or names, options.tests, path)
    console.print(table_of(document))
    for part in document["parts"]:
        if part["error"]:
            console.print(f"{part['name']}:", part["error"], markup=False, soft_wrap=True)
    console.print(f"wrote {path}", soft_wrap=True)
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
