"""What a machine with a GPU has to say: tests, parity, the benchmark; `make gpu-check`.

Runs from a bare checkout with nothing but torch, pytest, hypothesis and rich, prints one table
and writes one JSON file into the directory that OUT names (default benchmarks/results). A part
that fails does not stop the others, and what was seen before the time is over is in the file.
``--device cpu`` rehearses it on a machine without a GPU; above the stand-in for a driver it is a
rehearsal too, where what torch.compile makes runs with kernels that compute nothing. What tells
most comes first, and each part has seconds of its own, which no other can take: those that it
leaves go to the next ones. What hangs is killed at its limit, and the next one begins. All of it
has to share ten minutes; a group, or a part of gpu_check.toml, has ten minutes alone. Where there
are two GPUs, what needs them comes behind all that one can tell, in the order of what may hang
last, and has minutes of its own:

    make gpu-check ARGS="--group parts"   all but bench, and the tests that are not named
    make gpu-check ARGS="--group ranks"   NCCL in graphs, ranks that end, fail and are lost
    make gpu-check ARGS="--group tests"   all tests that need a GPU, on several processes
    make gpu-check ARGS="--group bench"   graphfsdp bench

Exit code: 0 all is well, 1 something failed, 2 there is no CUDA device.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console

from graphfsdp.bench.results import (
    Result,
    Row,
    Table,
    case_table,
    environment_text,
    find_environment,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Part:
    """A table of gpu_check.toml, which says what each key is."""

    seconds: float
    tests: tuple[str, ...] = ()
    program: str = ""
    bench: str = ""
    rehearsal: str = ""
    gpus: int = 0


_TABLES = tomllib.loads((ROOT / "benchmarks" / "gpu_check.toml").read_text())
PARTS: Mapping[str, Part] = MappingProxyType(
    {name: Part(**{**t, "tests": tuple(t.get("tests", ()))}) for name, t in _TABLES.items()}
)
TESTS = "tests"  # the part
TOTAL_LIMIT_S = 560  # of 600 that a lent machine gives a command
TEST_LIMIT_S = 60  # of one that has a process of its own
TOGETHER_LIMIT_S = 150  # of tests that share a process
NUM_TOGETHER = 12  # of one file
NUM_PROCESSES = 14  # that run tests on the GPU at the same time
GRACE_S = 20  # to report so far
KILLED_S = 10.0  # for the system to end what was killed
OURS = ("forward_backward", "full_iteration", "compiled_recording")
BENCH_START_S = 20.0  # Python starts
MAX_CHARACTERS = 6000


def failed(what: str, result: str, text: str = "") -> Row:
    """Return a row of what went wrong, with all that was said of it."""
    return {"what": what, "result": result, "ok": False, "text": text[-MAX_CHARACTERS:]}


def run_limited(
    command: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str],
    *,
    grace_s: float = 0.0,
) -> tuple[int | None, str]:
    """Run a program; return its exit code, None past the limit, and all that it has written.

    With ``grace_s`` the program gets a Ctrl-C at the limit and so long to report. What hangs holds
    a GPU, and what its parent writes into: so at its end its whole session is killed, what was
    written is read from a file, and nobody waits for what cannot be killed, as one deep in a
    driver.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = wait(process, limit_s)
            if code is None and grace_s:
                process.send_signal(signal.SIGINT)
                wait(process, grace_s)
        finally:  # also after Ctrl-C
            with suppress(ProcessLookupError):  # it was alone
                os.killpg(process.pid, signal.SIGKILL)
            wait(process, KILLED_S)
        output.seek(0)
        return code, output.read()


def wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def run_pytest(
    options: Sequence[str], limit_s: float, device: torch.device, **how: float
) -> tuple[int | None, str]:
    marked = ["-m", "gpu or multi_gpu"] if device.type == "cuda" else []
    return run_limited(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *marked, *options],
        limit_s,
        # A plugin that happens to be installed may warn, and here a warning is an error.
        {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        **how,
    )


def run_tests(
    paths: Sequence[str], limit_s: float, device: torch.device
) -> tuple[Counter[str], list[Row]]:
    """Run tests in a process, and past the limit tell of those so far; on a GPU those that need it.

    Returned are how many passed, failed and were skipped, and rows of what went wrong and of what a
    test has recorded by ``record_property``.
    """
    what = f"pytest {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        # The other family of reports has no properties.
        options = ("-o", "junit_family=xunit1", f"--junitxml={report}")
        # With the grace pytest writes what it has so far.
        code, output = run_pytest((*options, *paths), limit_s, device, grace_s=GRACE_S)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    rows = []
    if code is None:
        places = [line for line in output.splitlines() if line.endswith("KeyboardInterrupt")]
        where = "; ".join(["the counts are of what ran", *places])
        rows.append(failed(what, f"stopped after {limit_s:.0f} s; {where}"))
    elif code not in (0, 1):
        rows.append(failed(what, f"pytest ended with {code}", output))
    counts: Counter[str] = Counter()
    for case in cases:
        if not case.get("name"):  # a test that was interrupted has an entry without one
            continue
        outcomes = {element.tag: element for element in case}
        bad = outcomes.get("failure", outcomes.get("error"))
        if bad is not None:
            text = bad.text or bad.get("message") or ""
            name = f"{case.get('classname', '')}.{case.get('name')}"
            rows.append(failed(name, last_line(text), text))
        result = "failed" if bad is not None else "skipped" if "skipped" in outcomes else "passed"
        counts[result] += 1
        for found in case.iter("property"):
            rows.append({"what": found.get("name"), "result": found.get("value"), "ok": True})
    return counts, rows


def tests_part(part: Part, limit_s: float, device: torch.device, times: float) -> list[Row]:
    """Run tests in several processes, some at a time.

    One that is named has its own, and a row. Of those of files a few share one, and those of a
    folder have a row.
    """
    deadline = time.monotonic() + limit_s
    paths = [test.replace("DEVICE", device.type) for test in part.tests]
    num_at_once = max(min(NUM_PROCESSES, (os.cpu_count() or 1) - 2), 1)
    if part.gpus > 1:  # each takes both
        num_at_once = 1
    groups = [(path, [path]) for path in paths if "::" in path]
    if files := [path for path in paths if "::" not in path]:
        code, output = run_pytest(("--collect-only", *files), limit_s, device)
        if code != 0:
            return [failed("pytest --collect-only", f"ended with {code}", output)]
        found = [line for line in output.splitlines() if "::" in line]
        for file, tests in itertools.groupby(found, lambda test: test.partition("::")[0]):
            its, folder = list(tests), "/".join(file.split("/")[:2])
            firsts = range(0, len(its), NUM_TOGETHER)
            groups += [(folder, its[first : first + NUM_TOGETHER]) for first in firsts]

    def run(group: tuple[str, Sequence[str]]) -> tuple[Counter[str], list[Row]]:
        name, tests = group
        most_s = times * (TEST_LIMIT_S if [name] == tests else TOGETHER_LIMIT_S)
        left_s = min(most_s, deadline - time.monotonic())
        if left_s < 1:
            return Counter(), [failed(f"pytest {tests[0]}", f"left out: {limit_s:.0f} s are over")]
        return run_tests(tests, left_s, device)

    with concurrent.futures.ThreadPoolExecutor(num_at_once) as pool:
        told = list(zip(groups, pool.map(run, groups), strict=True))
    rows: list[Row] = []
    for name in dict(groups):
        own = [results for (of, _), results in told if of == name]
        counts = sum((each for each, _ in own), Counter[str]())
        found_here = [row for _, found_rows in own for row in found_rows]
        num_run = counts.total() if device.type == "cpu" or name not in paths else counts["passed"]
        text = ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped"))
        good = bool(num_run) and all(row["ok"] for row in found_here)
        rows += [{"what": f"pytest {name}", "result": text, "ok": good}, *found_here]
    return rows


def bench_rows(folder: pathlib.Path, results: pathlib.Path) -> list[Row]:
    """A row is good if the contender ran, or is not ours; and if ours trained eager's losses.

    The result of a whole suite is kept.
    """
    from benchmarks.readme_table import keep  # which imports this module

    result = Result.read(folder)
    if result.head["options"].get("suite") != "quick":
        keep(folder, results)
    rows: list[Row] = []
    for case in result.cases:
        table = case_table(result, case)
        for own, cells in zip(result.of(case), table.rows, strict=True):
            pairs = zip(table.heading[1:], cells[1:], strict=True)
            text = ", ".join(f"{title} {cell}" for title, cell in pairs)
            good = own["max_difference"] is not None
            rows.append({"what": f"{case}: {own['contender']}", "result": text, "ok": good})
    for own in (row for row in result.rows if "reason" in row):  # of a contender, or a whole case
        who = own.get("contender", "left out")
        good = who not in OURS
        rows.append({"what": f"{own['case']}: {who}", "result": own["reason"], "ok": good})
    return rows


def last_line(text: str) -> str:
    """Return the line of a traceback that says what happened."""
    lines = [line for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or [""])[0 if marked else -1][:200]


def table_of(document: dict[str, Any]) -> Table:
    title = environment_text(document["environment"])
    rows = [
        (part["name"], row["what"], row["result"], "yes" if row["ok"] else "no")
        for part in document["parts"]
        for row in part["rows"]
    ]
    return Table(title, ("part", "what", "result", "good"), rows, num_left=4)


def run_part(
    part: Part,
    limit_s: float,
    device: torch.device,
    results: pathlib.Path,
    *,
    times: float,
    rehearses: bool,
) -> list[Row]:
    if part.tests:
        return tests_part(part, limit_s, device, times)
    words = f"{part.program or part.bench} --device {device.type}".split()
    words += part.rehearsal.split() if rehearses else []
    if part.bench:  # cases that do not fit are named in the rows
        budget = max(limit_s - BENCH_START_S, 1.0) / 60
        words = ["graphfsdp", "bench", *words, "--budget", f"{budget:.3f}"]
    environment = dict(os.environ)
    if "CUDA_STAND_IN" in environment:  # where nobody computes what torch.compile makes
        environment["CUDA_STAND_IN_KERNELS"] = "none"
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out"
        command = [sys.executable, "-m", *words, "--out", str(out)]
        code, output = run_limited(command, limit_s, environment)
        if out.is_file():  # such a program ends with 1 where a row is not good
            rows: list[Row] = json.loads(out.read_text())["rows"]
            return rows
        if code == 0:
            return bench_rows(out, results)
    why = f"the process ended with {code}: {last_line(output)}"
    if code is None:
        why = f"stopped after {limit_s:.0f} s"
    return [failed(words[0], why, output)]


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
        if num_gpus < part.gpus:
            text = f"left out: {num_gpus} of {part.gpus} GPUs are here"
            rows = [{"what": "needs GPUs", "result": text, "ok": True}]
        elif limit_s < 10:
            rows = [failed("", f"left out: {total_s:.0f} s are over")]
        else:
            rows = run_part(part, limit_s, device, path.parent, times=times, rehearses=rehearses)
        bad = [row for row in rows if not row["ok"]]
        took_s = round(time.monotonic() - start, 1)
        document["parts"].append({"name": name, "ok": not bad, "seconds": took_s, "rows": rows})
        why = f"; {bad[0]['result']}" if bad else ""
        tell(f"{name}: {len(rows) - len(bad)} of {len(rows)} good, {took_s:.0f} s{why}")
        document["ok"] = number == len(parts) and all(done["ok"] for done in document["parts"])
        path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    apart = {n for n, part in PARTS.items() if part.gpus > 1 or part.bench or n == TESTS}
    groups = {
        "parts": [n for n in PARTS if n not in apart],
        "ranks": [n for n, part in PARTS.items() if part.gpus > 1],
        "bench": [n for n, part in PARTS.items() if part.bench],
    }
    groups = {**{name: [name] for name in PARTS}, **groups}
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--group", choices=groups, help="some of the parts, or one")
    parser.add_argument(
        "--times", type=float, default=1.0, help="all limits so many times as long (a rehearsal)"
    )
    options = parser.parse_args(arguments)
    # A shell starts what runs in the background deaf to Ctrl-C, which ends a pytest that is late.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console(width=None if sys.stdout.isatty() else 160)

    def tell(*texts: str) -> None:
        console.print(*texts, markup=False, soft_wrap=True)

    if options.device == "cuda" and not torch.cuda.is_available():
        tell(
            "gpu-check needs a CUDA device and torch sees none here. Run it on a machine with a "
            "GPU, or rehearse it: python3 -m benchmarks.gpu_check --device cpu"
        )
        return 2
    device = torch.device(options.device)
    rehearses = device.type == "cpu" or "CUDA_STAND_IN" in os.environ
    facts = find_environment(device)
    group = f"_{options.group}" if options.group else ""
    gpu = re.sub(r"[^a-z0-9]+", "-", (facts["gpu"] or "cpu").lower()).strip("-")
    folder = pathlib.Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu_check{group}_{gpu}_{facts['date'][:10]}.json"
    chosen = {name: PARTS[name] for name in groups.get(options.group, PARTS)}
    if TESTS in chosen:
        asked = chosen[TESTS].tests[: 1 if rehearses else None]
        chosen[TESTS] = dataclasses.replace(chosen[TESTS], tests=asked)
    document = check(device, chosen, path, tell, options.times, rehearses=rehearses)
    console.print(table_of(document).rich())
    for part in document["parts"]:
        for row in filter(lambda row: row.get("text"), part["rows"]):
            tell(f"{part['name']}: {row['what']}:", row["text"])
    tell(f"wrote {path}")
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
