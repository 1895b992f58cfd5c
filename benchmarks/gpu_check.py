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
import importlib.util
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console

from benchmarks.limited import ROOT, run_limited
from graphfsdp.bench.machine import find_environment
from graphfsdp.bench.results import Table

TESTS, BENCH, REDUCE_OVERHEAD = "tests", "bench", "reduce-overhead"
NODES, OPTIMIZER = "nodes", "optimizer"
# In order, each with its own seconds.
BUDGETS_S: Mapping[str, float] = MappingProxyType(
    {
        "smoke": 80,
        "parity": 55,
        "verify-pinned": 25,
        NODES: 40,
        "broken": 20,
        TESTS: 110,
        "overlap": 40,
        "compile": 35,
        OPTIMIZER: 40,
        BENCH: 70,
        # Last: it leaves graphs behind in its process that may take the memory of others.
        REDUCE_OVERHEAD: 45,
    }
)
# Of what needs two GPUs, besides; left out where there is one. What may hang last comes last: ranks
# that are to be lost, and captures in which NCCL registers buffers.
RANK_BUDGETS_S: Mapping[str, float] = MappingProxyType(
    {"nccl": 75, "ends": 90, "mismatch": 40, "lost": 120, "nccl-registered": 75}
)
# A CUDA error makes every later call in a process fail, so in these parts each test has a process
# of its own.
ALONE = ("smoke", "parity", "verify-pinned", "broken", *RANK_BUDGETS_S)


def tests_of_parts() -> dict[str, list[str]]:
    """Return what each part that runs tests gives to pytest, DEVICE for that of the check."""
    parts: dict[str, list[str]] = {}
    for line in (ROOT / "benchmarks" / "gpu_check_parts.txt").read_text().splitlines():
        if line.startswith("["):
            names = parts[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            names.append(line)
    return parts


PARTS: Mapping[str, Sequence[str]] = MappingProxyType(tests_of_parts())
TOTAL_LIMIT_S = 560  # of 600 that a lent machine gives a command
TEST_LIMIT_S = 60  # of one that has a process of its own
NUM_PROCESSES = 6  # that run tests on the GPU at the same time
GRACE_S = 20  # to report so far
# So many GPUs at least; what all other parts need a rehearsal on a CPU has.
NUM_GPUS: Mapping[str, int] = MappingProxyType({NODES: 1, **dict.fromkeys(RANK_BUDGETS_S, 2)})
SIZES = (1_000, 20_000)  # of captures, in nodes
OURS = ("forward_backward", "full_iteration", "compiled_recording")
# All but torch's reduce-overhead mode.
CONTENDERS = (*OURS, "pytorch", "compile", "fsdp2", "fsdp2_compile", "megatron_fsdp")
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


def suite_part(
    paths: Sequence[str], limit_s: float, device: torch.device, options: Sequence[str] = ()
) -> dict[str, Any]:
    """On a GPU only the tests that need one.

    What a test has recorded by ``record_property`` is a row.
    """
    marked = ["-m", "gpu or multi_gpu"] if device.type == "cuda" else []
    cases, error = run_pytest([*marked, *options, *paths], limit_s)
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    skips: dict[str, str] = {}
    for case in cases:
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        outcomes = {element.tag: element for element in case}
        bad = outcomes.get("failure", outcomes.get("error"))
        if bad is not None:
            failures[name] = (bad.text or bad.get("message") or "")[-MAX_CHARACTERS:]
            rows.append({"what": name, "result": last_line(failures[name]), "ok": False})
        elif "skipped" in outcomes:
            skips[name] = outcomes["skipped"].get("message") or ""
        for found in case.iter("property"):
            rows.append({"what": found.get("name"), "result": found.get("value"), "ok": True})
    num_passed = len(cases) - len(failures) - len(skips)
    text = f"{num_passed} passed, {len(failures)} failed, {len(skips)} skipped"
    # What only a GPU has is skipped on a CPU that rehearses.
    good = not failures and not error and bool(num_passed or (skips and device.type == "cpu"))
    rows.insert(0, {"what": "pytest " + " ".join(paths), "result": text, "ok": good})
    return {"rows": rows, "error": error or None, "failures": failures, "skips": skips}


def spread_part(paths: Sequence[str], limit_s: float, device: torch.device) -> dict[str, Any]:
    """Run a suite on several processes, by file, since tests of a file share what is slow to make.

    With pytest-xdist another process goes on where one has lost its device.
    """
    count = _num_processes()
    if importlib.util.find_spec("xdist") is not None:
        xdist = ("-p", "xdist", "-n", str(count), "--dist", "loadfile")
        return suite_part(paths, limit_s, device, xdist)
    files: list[str] = []
    for path in paths:
        found = sorted((ROOT / path).rglob("test_*.py"))
        files += map(str, found) if found else [path]
    groups = [files[first::count] for first in range(min(count, len(files)))]
    return alone_part(groups, limit_s, limit_s, device)


def alone_part(
    groups: Sequence[Sequence[str]],
    limit_s: float,
    group_limit_s: float,
    device: torch.device,
    num_at_once: int | None = None,
) -> dict[str, Any]:
    """Run groups of tests, each in a process of its own, some at a time."""
    deadline = time.monotonic() + limit_s

    def run(group: Sequence[str]) -> dict[str, Any]:
        left_s = min(group_limit_s, deadline - time.monotonic())
        if left_s < 1:
            text = f"left out: {limit_s:.0f} s are over"
            row = {"what": f"pytest {' '.join(group)}", "result": text, "ok": False}
            return {"rows": [row], "error": None, "failures": {}}
        return suite_part(group, left_s, device)

    with concurrent.futures.ThreadPoolExecutor(num_at_once or _num_processes()) as pool:
        parts = [*pool.map(run, groups)]
    wrong = [
        f"{' '.join(group)}:\n{part['error']}"
        for group, part in zip(groups, parts, strict=True)
        if part["error"]
    ]
    return {
        "rows": [row for part in parts for row in part["rows"]],
        "error": "\n\n".join(wrong) or None,
        "failures": {name: text for part in parts for name, text in part["failures"].items()},
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


def rows_part(module: str, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a program that measures; what is too slow is a row that is not good."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.json"
        error = run_program([f"benchmarks.{module}", *arguments, "--out", str(path)], limit_s)
        if path.exists():  # such a program ends with 1 where a row is not good
            return {"rows": json.loads(path.read_text())["rows"], "error": None}
        return {"rows": [], "error": error}


def left_out(name: str, num_gpus: int) -> dict[str, Any]:
    has = {0: "no GPU", 1: "one GPU"}.get(num_gpus, f"{num_gpus} GPUs")
    what = " ".join(["needs", "two GPUs" if NUM_GPUS[name] > 1 else "a GPU"])
    return {"rows": [{"what": what, "result": f"left out: {has}", "ok": True}], "error": None}


def bench_part(
    device: torch.device,
    limit_s: float,
    results: pathlib.Path,
    *,
    reduce_overhead: bool = False,
    rehearses: bool = False,
) -> dict[str, Any]:
    """A rehearsal has one small case; cases that do not fit are named in the rows.

    torch's reduce-overhead mode runs by itself, on one small case whose result is not kept.
    """
    suite = ["--suite", "gpu"]
    if rehearses or reduce_overhead:
        suite = ["--suite", "quick", "--seconds", "0.5"]
    suite += ["--contender", *(["reduce_overhead"] if reduce_overhead else CONTENDERS)]
    budget = max(limit_s - BENCH_START_S, 1.0) / 60
    with tempfile.TemporaryDirectory() as folder:
        command = ["graphfsdp", "bench", "--device", device.type, *suite]
        command += ["--budget", f"{budget:.3f}", "--out", folder]
        error = run_program(command, limit_s)
        if error is not None:
            return {"rows": [], "error": error}
        kept = pathlib.Path(folder) / "kept" if reduce_overhead else results
        return {"rows": bench_rows(pathlib.Path(folder), kept), "error": None}


def bench_rows(folder: pathlib.Path, results: pathlib.Path) -> list[dict[str, Any]]:
    """A row is good if the contender ran, or is not ours; and if ours trained eager's losses."""
    # Here, since a package that cannot be imported is something to report.
    from benchmarks.readme_table import keep
    from graphfsdp.bench.results import Result, case_table, workload_text

    keep(folder, results)
    result = Result.read(folder)
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


def _num_processes() -> int:
    return min(NUM_PROCESSES, os.cpu_count() or 1)


def last_line(text: str) -> str:
    """Return the line of a traceback that says what happened."""
    lines = [line for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or [""])[0 if marked else -1][:200]


def described(facts: dict[str, Any]) -> str:
    where = f"{facts['gpu']}, driver {facts['driver']}" if facts["gpu"] else facts["cpu"]
    triton = facts["versions"].get("triton")
    return (
        f"measured {facts['date'][:10]} on {where}, torch {facts['torch']}, Triton {triton}, "
        f"Python {facts['python']}"
    )


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
    title = f"graphfsdp, {described(document['environment'])}"
    return Table(title, ("part", "what", "result", "good"), rows_of(document), num_left=4)


def check(
    device: torch.device,
    names: Sequence[str],
    path: pathlib.Path,
    tell: Callable[[str], None] = lambda line: None,
    times: float = 1.0,
    *,
    tests: Mapping[str, Sequence[str]] = PARTS,
    rehearses: bool = False,
) -> dict[str, Any]:
    """Run the parts one after the other; the file is complete after each of them.

    ``times``: all limits are so many times as long. ``rehearses``: a small benchmark.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    out = {name for name in names if num_gpus < NUM_GPUS.get(name, 0)}
    budgets = {**BUDGETS_S, **RANK_BUDGETS_S, **dict.fromkeys(out, 0.0)}
    total_s = max(TOTAL_LIMIT_S, sum(budgets[name] for name in names)) * times
    deadline = time.monotonic() + total_s
    document: dict[str, Any] = {
        "kind": "gpu_check",
        "environment": find_environment(device),
        "ok": False,
        "parts": [],
    }
    for index, name in enumerate(names):
        start = time.monotonic()
        reserved = sum(budgets[later] for later in names[index + 1 :])
        limit_s = deadline - start - reserved * times
        part: dict[str, Any]
        if name in out:
            part = left_out(name, num_gpus)
        elif limit_s < 10:
            part = {"rows": [], "error": f"left out: {total_s:.0f} s are over"}
        elif name == NODES:
            sizes = ["--device", device.type, "--nodes", *map(str, SIZES)]
            part = rows_part("capture_nodes", sizes, limit_s)
        elif name == OPTIMIZER:
            models = ["gpt-tiny"] if rehearses else ["gpt2-124m", "1b"]
            part = rows_part(
                "optimizer_step", ["--device", device.type, "--model", *models], limit_s
            )
        elif name in (BENCH, REDUCE_OVERHEAD):
            alone = name == REDUCE_OVERHEAD
            part = bench_part(
                device, limit_s, path.parent, reduce_overhead=alone, rehearses=rehearses
            )
        else:
            paths = [test.replace("DEVICE", device.type) for test in tests[name]]
            if name in ALONE:
                limits = limit_s, TEST_LIMIT_S * times
                at_once = 1 if name in RANK_BUDGETS_S else None  # each takes both GPUs
                part = alone_part([[path] for path in paths], *limits, device, at_once)
            elif name == TESTS and device.type == "cuda":
                part = spread_part(paths, limit_s, device)
            else:
                part = suite_part(paths, limit_s, device)
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
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups = {
        "parts": tuple(name for name in BUDGETS_S if name not in (TESTS, BENCH, REDUCE_OVERHEAD)),
        "ranks": tuple(RANK_BUDGETS_S),
        "tests": (TESTS,),
        "bench": (BENCH, REDUCE_OVERHEAD),
    }
    names = (*BUDGETS_S, *RANK_BUDGETS_S)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=names, action="append", help="a part; repeatable")
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
    chosen = options.part or groups.get(options.group, names)

    def tell(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    rehearses = options.rehearse or device.type == "cpu"
    few = PARTS[TESTS][:1] if options.rehearse else PARTS[TESTS]
    tests = {**PARTS, TESTS: options.tests or (["tests"] if options.group == TESTS else few)}
    document = check(device, chosen, path, tell, options.times, tests=tests, rehearses=rehearses)
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
