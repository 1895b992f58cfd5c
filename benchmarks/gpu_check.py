"""What a machine with a GPU has to say: tests, parity, the benchmark; `make gpu-check`.

Runs from a bare checkout with nothing but torch, pytest, hypothesis and rich, prints one table
and writes one JSON file into the directory that OUT names (default benchmarks/results). A part
that fails does not stop the others, and what was seen before the time is over is in the file.
``--device cpu`` rehearses it on a machine without a GPU. All of it has to share ten minutes; a
group by itself has them alone:

    make gpu-check ARGS="--group parts"   what issues ask of a GPU, row by row
    make gpu-check ARGS="--group tests"   the tests that need a GPU, on several processes
    make gpu-check ARGS="--group bench"   graphfsdp bench

Exit code: 0 all is well, 1 something failed, 2 there is no CUDA device.
"""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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
    "optimizer",
    "features",
    "overlap",
    "optimizer-1b",
    "offload",
    "parity-fp32",
    "parity-bf16",
)
TESTS = "tests"
# Last, since it takes what the others leave, up to its own limit.
BENCH = "bench"
TOTAL_LIMIT_S = 560  # of 600 that a lent machine gives a command
SUITE_LIMIT_S = 240  # beside all other parts
PART_LIMIT_S = 90
NUM_PROCESSES = 6  # that run tests on the GPU at the same time
MAX_CHARACTERS = 6000


def suite_part(
    paths: Sequence[str], limit_s: float, device: torch.device | None = None
) -> dict[str, Any]:
    """Run the tests, on a GPU those that need one, and return them as a part."""
    options: list[str] = []
    if device is not None and device.type == "cuda":
        options += ["-m", "gpu or multi_gpu"]
        if importlib.util.find_spec("xdist") is not None:
            # By file, since many tests of a file share what is slow to make.
            options += ["-p", "xdist", "-n", str(NUM_PROCESSES), "--dist", "loadfile"]
    result = run_suite(paths, limit_s, options)
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
        why = f"stopped after {limit_s:.0f} s\n{_text(late.stderr)[-MAX_CHARACTERS:]}"
        return {**(_last_document(_text(late.stdout)) or {"rows": []}), "error": why}
    document = _last_document(result.stdout)
    if document is None or result.returncode:
        tail = (result.stdout + result.stderr)[-MAX_CHARACTERS:]
        why = f"the process ended with {result.returncode}\n{tail}"
        return {**(document or {"rows": []}), "error": why}
    return document


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def _last_document(output: str) -> dict[str, Any] | None:
    """Return the last whole line that is a part's document; others may have printed as well."""
    for line in reversed(output.splitlines()):
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict) and "rows" in document:
            return document
    return None


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
    device: torch.device,
    names: Sequence[str],
    test_paths: Sequence[str],
    path: pathlib.Path,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the parts one after the other; the file is complete after each of them.

    Args:
        device: Where.
        names: Of the parts.
        test_paths: What pytest runs.
        path: The file.
        tell: Given one line after each part.
    """
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
        elif name == TESTS:
            alone = len(names) == 1
            part = suite_part(test_paths, left if alone else min(SUITE_LIMIT_S, left), device)
        elif name == BENCH:
            part = bench_part(device, left, path.parent)
        else:
            part = child_part(name, device, min(PART_LIMIT_S, left))
        good = part["error"] is None and all(row["ok"] for row in part["rows"])
        seconds = round(time.monotonic() - start, 1)
        document["parts"].append({"name": name, "ok": good, "seconds": seconds, **part})
        num_good = sum(row["ok"] for row in part["rows"])
        why = f"; {last_line(part['error'])}" if part["error"] else ""
        tell(f"{name}: {num_good} of {len(part['rows'])} good, {seconds:.0f} s{why}")
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
    groups = {"parts": PART_NAMES, "tests": (TESTS,), "bench": (BENCH,)}
    names = (*PART_NAMES, TESTS, BENCH)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=names, action="append", help="a part; repeatable")
    parser.add_argument("--group", choices=groups, help="some of the parts")
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
    group = f"_{options.group}" if options.group else ""
    name = f"gpu_check{group}_{environment.slug(str(facts['gpu'] or 'cpu'))}_{facts['date']}.json"
    path = environment.output_directory() / name
    chosen = options.part or groups.get(options.group, names)

    def tell(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    document = check(device, chosen, options.tests, path, tell)
    console.print(table_of(document))
    for part in document["parts"]:
        if part["error"]:
            console.print(f"{part['name']}:", part["error"], markup=False, soft_wrap=True)
    console.print(f"wrote {path}", soft_wrap=True)
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
