"""What a machine with a GPU has to say: tests, parity, the benchmark; `make gpu-check`.

Runs from a bare checkout with nothing but torch, pytest, hypothesis and rich, prints one table
and writes one JSON file into the directory that OUT names (default benchmarks/results). A part
that fails does not stop the others, and what was seen before the time is over is in the file.
``--device cpu`` rehearses it on a machine without a GPU; so does ``--rehearse`` above the stand-in
for a driver, where what torch.compile makes runs with kernels that compute nothing. What tells most
comes first, and each part has seconds of its own, which no other can take: those that it leaves go
to the next ones. What hangs is killed at its limit, and the next one begins. All of it has to share
ten minutes, so it runs the tests that tell most; a group by itself has ten minutes alone. Where
there are two GPUs, what needs them comes behind all that one can tell, in the order of what may
hang last, and has minutes of its own:

    make gpu-check ARGS="--group parts"   what issues ask of a GPU, row by row
    make gpu-check ARGS="--group ranks"   NCCL in graphs, ranks that end, fail and are lost
    make gpu-check ARGS="--group tests"   all tests that need a GPU, on several processes
    make gpu-check ARGS="--group bench"   graphfsdp bench

Exit code: 0 all is well, 1 something failed, 2 there is no CUDA device.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console

from benchmarks.limited import ROOT, run_limited
from graphfsdp.bench.machine import find_environment
from graphfsdp.bench.results import Table, environment_text


@dataclass(frozen=True)
class Part:
    """A table of gpu_check.toml, which says what each key is."""

    seconds: float
    tests: tuple[str, ...] = ()
    program: str = ""
    bench: str = ""
    rehearsal: str = ""
    gpus: int = 0


def read_parts() -> dict[str, Part]:
    tables = tomllib.loads((ROOT / "benchmarks" / "gpu_check.toml").read_text())
    return {
        name: Part(**{**table, "tests": tuple(table.get("tests", ()))})
        for name, table in tables.items()
    }


PARTS: Mapping[str, Part] = MappingProxyType(read_parts())
TESTS = "tests"  # the part
TOTAL_LIMIT_S = 560  # of 600 that a lent machine gives a command
TEST_LIMIT_S = 60  # of one that has a process of its own
NUM_PROCESSES = 6  # that run tests on the GPU at the same time
GRACE_S = 20  # to report so far
OURS = ("forward_backward", "full_iteration", "compiled_recording")
BENCH_START_S = 20.0  # Python starts
MAX_CHARACTERS = 6000


def run_pytest(arguments: Sequence[str], limit_s: float) -> tuple[list[ElementTree.Element], str]:
    """Return the cases, and why they are not to be trusted; past the limit, those so far."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        # The other family of reports has no properties.
        options = ("-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")
        code, output = run_limited(
            [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *arguments],
            limit_s,
            # A plugin that happens to be installed may warn, and here a warning is an error.
            {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            grace_s=GRACE_S,  # pytest then writes what it has so far
        )
        error = ""
        if code is None:
            places = [line for line in output.splitlines() if line.endswith("KeyboardInterrupt")]
            where = "; ".join(["the counts are of what ran", *places])
            error = f"stopped after {limit_s:.0f} s; {where}"
        elif not report.exists() or code not in (0, 1):
            error = f"pytest ended with {code}:\n{output[-MAX_CHARACTERS:]}"
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        # A test that was interrupted has an entry without a name.
        return [case for case in cases if case.get("name")], error


def run_tests(paths: Sequence[str], limit_s: float, device: torch.device) -> dict[str, Any]:
    """Run tests in a process; on a GPU only those that need one.

    What a test has recorded by ``record_property`` is a row.
    """
    marked = ["-m", "gpu or multi_gpu"] if device.type == "cuda" else []
    cases, error = run_pytest([*marked, *paths], limit_s)
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    num_skipped = 0
    for case in cases:
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        outcomes = {element.tag: element for element in case}
        bad = outcomes.get("failure", outcomes.get("error"))
        if bad is not None:
            failures[name] = (bad.text or bad.get("message") or "")[-MAX_CHARACTERS:]
            rows.append({"what": name, "result": last_line(failures[name]), "ok": False})
        num_skipped += "skipped" in outcomes
        for found in case.iter("property"):
            rows.append({"what": found.get("name"), "result": found.get("value"), "ok": True})
    num_passed = len(cases) - len(failures) - num_skipped
    text = f"{num_passed} passed, {len(failures)} failed, {num_skipped} skipped"
    # What only a GPU has is skipped on a CPU that rehearses.
    good = not failures and not error and bool(num_passed or (num_skipped and device.type == "cpu"))
    rows.insert(0, {"what": "pytest " + " ".join(paths), "result": text, "ok": good})
    return {"rows": rows, "error": error or None, "failures": failures}


def tests_part(part: Part, limit_s: float, device: torch.device, times: float) -> dict[str, Any]:
    """Run tests in several processes, some at a time.

    One that is named has its own; those of a file share what is slow to make, and stay together.
    """
    deadline = time.monotonic() + limit_s
    paths = [test.replace("DEVICE", device.type) for test in part.tests]
    num_at_once = min(NUM_PROCESSES, os.cpu_count() or 1)
    if part.gpus > 1:  # each takes both
        num_at_once = 1
    alone = [path for path in paths if "::" in path]
    files: list[str] = []
    for path in (path for path in paths if path not in alone):
        found = sorted((ROOT / path).rglob("test_*.py"))
        files += map(str, found) if found else [path]
    groups = [[path] for path in alone]
    groups += [files[first::num_at_once] for first in range(min(num_at_once, len(files)))]

    def run(group: Sequence[str]) -> dict[str, Any]:
        most_s = TEST_LIMIT_S * times if group[0] in alone else limit_s
        left_s = min(most_s, deadline - time.monotonic())
        if left_s < 1:
            text = f"left out: {limit_s:.0f} s are over"
            row = {"what": f"pytest {' '.join(group)}", "result": text, "ok": False}
            return {"rows": [row], "error": None, "failures": {}}
        return run_tests(group, left_s, device)

    with concurrent.futures.ThreadPoolExecutor(num_at_once) as pool:
        done = [*pool.map(run, groups)]
    wrong = [
        f"{' '.join(group)}:\n{each['error']}"
        for group, each in zip(groups, done, strict=True)
        if each["error"]
    ]
    return {
        "rows": [row for each in done for row in each["rows"]],
        "error": "\n\n".join(wrong) or None,
        "failures": {name: text for each in done for name, text in each["failures"].items()},
    }


def run_program(module: Sequence[str], limit_s: float) -> str | None:
    """Run a module and its arguments; return what was wrong."""
    environment = dict(os.environ)
    if "CUDA_STAND_IN" in environment:  # where nobody computes what torch.compile makes
        environment["CUDA_STAND_IN_KERNELS"] = "none"
    code, output = run_limited([sys.executable, "-m", *module], limit_s, environment)
    if code is None:
        return f"stopped after {limit_s:.0f} s"
    return f"the process ended with {code}\n{output[-MAX_CHARACTERS:]}" if code else None


def rows_part(words: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a program that measures; what is too slow is a row that is not good."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.json"
        module, *arguments = words
        error = run_program([f"benchmarks.{module}", *arguments, "--out", str(path)], limit_s)
        if path.exists():  # such a program ends with 1 where a row is not good
            return {"rows": json.loads(path.read_text())["rows"], "error": None}
        return {"rows": [], "error": error}


def bench_part(words: Sequence[str], limit_s: float, results: pathlib.Path) -> dict[str, Any]:
    """Run the benchmark; cases that do not fit are named in the rows."""
    budget = max(limit_s - BENCH_START_S, 1.0) / 60
    with tempfile.TemporaryDirectory() as folder:
        command = ["graphfsdp", "bench", *words, "--budget", f"{budget:.3f}", "--out", folder]
        error = run_program(command, limit_s)
        if error is not None:
            return {"rows": [], "error": error}
        return {"rows": bench_rows(pathlib.Path(folder), results), "error": None}


def bench_rows(folder: pathlib.Path, results: pathlib.Path) -> list[dict[str, Any]]:
    """A row is good if the contender ran, or is not ours; and if ours trained eager's losses.

    The result of a whole suite is kept.
    """
    # Here, since a package that cannot be imported is something to report.
    from benchmarks.readme_table import keep
    from graphfsdp.bench.results import Result, case_table, workload_text

    result = Result.read(folder)
    if result.head["options"].get("suite") != "quick":
        keep(folder, results)
    rows: list[dict[str, Any]] = []
    for case in result.cases:
        table = case_table(result, case)
        name = workload_text(result.of(case)[0])
        for own, cells in zip(result.of(case), table.rows, strict=True):
            pairs = zip(table.heading, cells, strict=True)
            text = ", ".join(f"{title} {cell}" for title, cell in list(pairs)[1:])
            good = own["max_difference"] is not None
            rows.append({"what": f"{name}: {own['contender']}", "result": text, "ok": good})
        for own in result.not_run(case):
            good = own["contender"] not in OURS
            what = f"{name}: {own['contender']}"
            rows.append({"what": what, "result": own["reason"], "ok": good})
    rows += [
        {"what": key, "result": f"left out: {why}", "ok": True}
        for key, why in result.left_out.items()
    ]
    return rows


def last_line(text: str) -> str:
    """Return the line of a traceback that says what happened."""
    lines = [line for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or [""])[0 if marked else -1][:200]


def rows_of(document: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for part in document["parts"]:
        rows += [
            (part["name"], row["what"], row["result"], "yes" if row["ok"] else "no")
            for row in part["rows"]
        ]
        if part["error"]:
            rows.append((part["name"], "", last_line(part["error"]), "no"))
    return rows


def table_of(document: dict[str, Any]) -> Table:
    title = environment_text(document["environment"])
    return Table(title, ("part", "what", "result", "good"), rows_of(document), num_left=4)


def run_part(
    part: Part,
    limit_s: float,
    device: torch.device,
    results: pathlib.Path,
    *,
    times: float,
    rehearses: bool,
) -> dict[str, Any]:
    if part.tests:
        return tests_part(part, limit_s, device, times)
    words = f"{part.program or part.bench} --device {device.type}".split()
    words += part.rehearsal.split() if rehearses else []
    if part.program:
        return rows_part(words, limit_s)
    return bench_part(words, limit_s, results)


def check(
    device: torch.device,
    parts: Mapping[str, Part],
    path: pathlib.Path,
    tell: Callable[[str], None] = lambda line: None,
    times: float = 1.0,
    *,
    rehearses: bool = False,
) -> dict[str, Any]:
    """Run the parts one after the other; the file is complete after each of them.

    ``times``: all limits are so many times as long. ``rehearses``: a small benchmark.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    seconds = [part.seconds if num_gpus >= part.gpus else 0.0 for part in parts.values()]
    total_s = max(TOTAL_LIMIT_S, sum(seconds)) * times
    deadline = time.monotonic() + total_s
    document: dict[str, Any] = {
        "kind": "gpu_check",
        "environment": find_environment(device),
        "ok": False,
        "parts": [],
    }
    for number, (name, part) in enumerate(parts.items(), 1):
        start = time.monotonic()
        limit_s = deadline - start - sum(seconds[number:]) * times
        found: dict[str, Any]
        if num_gpus < part.gpus:
            text = f"left out: {num_gpus} of {part.gpus} GPUs are here"
            found = {"rows": [{"what": "needs GPUs", "result": text, "ok": True}], "error": None}
        elif limit_s < 10:
            found = {"rows": [], "error": f"left out: {total_s:.0f} s are over"}
        else:
            found = run_part(part, limit_s, device, path.parent, times=times, rehearses=rehearses)
        good = found["error"] is None and all(row["ok"] for row in found["rows"])
        took_s = round(time.monotonic() - start, 1)
        document["parts"].append({"name": name, "ok": good, "seconds": took_s, **found})
        num_good = sum(row["ok"] for row in found["rows"])
        why = f"; {last_line(found['error'])}" if found["error"] else ""
        tell(f"{name}: {num_good} of {len(found['rows'])} good, {took_s:.0f} s{why}")
        document["ok"] = number == len(parts) and all(done["ok"] for done in document["parts"])
        path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups = {
        "parts": [n for n, part in PARTS.items() if part.gpus < 2 and not part.bench],
        "ranks": [n for n, part in PARTS.items() if part.gpus > 1],
        "tests": [TESTS],
        "bench": [n for n, part in PARTS.items() if part.bench],
    }
    groups["parts"].remove(TESTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=PARTS, action="append", help="a part; repeatable")
    parser.add_argument("--group", choices=groups, help="some of the parts")
    parser.add_argument("--tests", nargs="+", help="what pytest runs")
    parser.add_argument(
        "--times", type=float, default=1.0, help="all limits so many times as long (a rehearsal)"
    )
    parser.add_argument("--rehearse", action="store_true", help="smallest models")
    options = parser.parse_args(arguments)
    # A shell starts what runs in the background deaf to Ctrl-C, which ends a pytest that is late.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print(
            "gpu-check needs a CUDA device and torch sees none here. Run it on a machine with a "
            "GPU, or rehearse it: python3 -m benchmarks.gpu_check --device cpu",
            soft_wrap=True,
        )
        return 2
    device = torch.device(options.device)
    facts = find_environment(device)
    group = f"_{options.group}" if options.group else ""
    gpu = re.sub(r"[^a-z0-9]+", "-", (facts["gpu"] or "cpu").lower()).strip("-")
    folder = pathlib.Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu_check{group}_{gpu}_{facts['date'][:10]}.json"
    chosen = {name: PARTS[name] for name in options.part or groups.get(options.group, PARTS)}
    if TESTS in chosen:
        few = PARTS[TESTS].tests[: 1 if options.rehearse else None]
        asked = options.tests or (["tests"] if options.group == TESTS else few)
        chosen[TESTS] = dataclasses.replace(chosen[TESTS], tests=tuple(asked))

    def tell(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    rehearses = options.rehearse or device.type == "cpu"
    document = check(device, chosen, path, tell, options.times, rehearses=rehearses)
    table = table_of(document)
    console.print(table.rich(["" if row[-1] == "yes" else "red" for row in table.rows]))
    for part in document["parts"]:
        for text in (part["error"], *part.get("failures", {}).values()):
            if text:
                console.print(f"{part['name']}:", text, markup=False, soft_wrap=True)
    console.print(f"wrote {path}", soft_wrap=True)
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
