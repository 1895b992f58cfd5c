"""Puts numbers into the README and the docs, between markers; a test compares them.

``<!-- bench_cpu: begin -->`` and ``<!-- bench_cpu: end -->`` stand around the tables of
`make bench`, ``bench_zoo`` around those of ``graphfsdp bench --suite zoo``, ``bench_gpu`` around
those of the newest result of a GPU, ``gpu_check`` around that of the newest `make gpu-check`,
``speed_summary`` around the geometric means of the first two, which is what the README shows, and
``beside_cpu`` around the first beside plain PyTorch, one line for each contender.

``python -m benchmarks.readme_table --keep DIR`` first copies a result directory of ``graphfsdp
bench`` into benchmarks/results.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from benchmarks.gpu_check import table_of
from graphfsdp.bench.results import (
    REFERENCE,
    Result,
    Row,
    Table,
    environment_text,
    overview,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "speed.md", ROOT / "docs" / "beside.md")
# The columns of the README's summary, and whose they are.
SUMMARY = MappingProxyType(
    {
        "plain PyTorch": "pytorch",
        "torch.compile": "compile",
        "graphfsdp, one graph": "full_iteration",
        "the same, compiled": "compiled_recording",
    }
)

BESIDE = MappingProxyType(
    {
        "compile": "torch.compile, AdamW(fused=True)",
        "fsdp2": "FSDP2, one rank",
        "fsdp2_compile": "FSDP2, one rank, blocks compiled",
        "forward_backward": "graphfsdp, forward and backward in a graph",
        "full_iteration": "graphfsdp, the whole iteration",
        "compiled_recording": "graphfsdp, the whole iteration, compiled",
    }
)


def bench_gpu(results: pathlib.Path) -> str:
    found = map(Result.read, results.glob("bench_gpu_*.jsonl"))
    newest = max(found, key=lambda result: str(result.head["environment"]["date"]), default=None)
    return "No GPU has been measured yet." if newest is None else bench_section(newest)


def bench_section(result: Result) -> str:
    table = overview(result)
    parts = [f"{table.title.capitalize()}:\n\n{table.markdown()}"]
    means = [f"{name} {mean:.2f}x" for name, mean in speedups(result, result.cases).items()]
    if means and len(result.cases) > 1:
        parts.append(f"Geometric means, times as fast as eager: {', '.join(means)}.")
    missing = [f"`{name}`: {reason}" for name, reason in result.reasons().items()]
    if missing:
        parts.append(f"Did not run: {'; '.join(missing)}.")
    return "\n\n".join((*parts, environment_text(result.head["environment"])))


def speedups(result: Result, cases: Sequence[str]) -> dict[str, float]:
    """Return the geometric means over eager of the contenders that ran in every case."""
    means = {}
    for name in result.names:
        ratios = [result.ratios(case, name) for case in cases]
        if name != REFERENCE and ratios and all(ratios):
            means[name] = statistics.geometric_mean(map(statistics.median, ratios))
    return means


def speed_summary(results: pathlib.Path) -> str:
    """Of the cases in which all of the columns ran."""
    rows = []
    for name, what in (
        ("bench_cpu", "workloads of `make bench`, launch-bound and compute-bound"),
        ("bench_zoo", "small architectures, launch-bound"),
    ):
        result = Result.read(results / f"{name}.jsonl")
        columns = SUMMARY.values()
        cases = [case for case in result.cases if all(result.ratios(case, key) for key in columns)]
        means = speedups(result, cases)
        if cases:
            rows.append((f"{len(cases)} {what}", *(f"{means[key]:.2f}x" for key in columns)))
    heading = ("times as fast as our eager code, geometric mean, on a CPU", *SUMMARY)
    return Table("", heading, rows).markdown()


def beside_cpu(results: pathlib.Path) -> str:
    result = Result.read(results / "bench_cpu.jsonl")
    rows = []
    for name, what in BESIDE.items():
        ratios = [result.ratios(case, name, "pytorch") for case in result.cases]
        found = [statistics.median(each) for each in ratios if each]
        if found:
            numbers = (statistics.geometric_mean(found), min(found), max(found))
            rows.append((what, str(len(found)), *(f"{number:.2f}x" for number in numbers)))
    heading = ("times as fast as a plain loop, on a CPU", "workloads", "mean", "least", "most")
    text = environment_text(result.head["environment"])
    return f"{Table('', heading, tuple(rows)).markdown()}\n\n{text}"


def gpu_check(results: pathlib.Path) -> str:
    """Its groups may have run one by one: those of one GPU and one day belong together."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for path in sorted(results.glob("gpu_check_*.json")):
        found = json.loads(path.read_text())
        facts = found["environment"]
        if facts["gpu"]:
            runs.setdefault((facts["date"][:10], facts["gpu"]), []).append(found)
    if not runs:
        return "No GPU has been measured yet."
    newest = runs[max(runs)]
    table = table_of({**newest[0], "parts": [part for each in newest for part in each["parts"]]})
    return f"{table.markdown()}\n\n{table.title}"


SECTIONS: Mapping[str, Callable[[pathlib.Path], str]] = {
    "beside_cpu": beside_cpu,
    "bench_cpu": lambda results: bench_section(Result.read(results / "bench_cpu.jsonl")),
    "bench_gpu": bench_gpu,
    "bench_zoo": lambda results: bench_section(Result.read(results / "bench_zoo.jsonl")),
    "gpu_check": gpu_check,
    "speed_summary": speed_summary,
}


def updated(text: str, results: pathlib.Path = RESULTS) -> str:
    for name, make in SECTIONS.items():
        if f"<!-- {name}: begin -->" in text:
            text = with_section(text, name, make(results))
    return text


def with_section(text: str, name: str, content: str) -> str:
    """Put it between the markers of that name, if there are any."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    if not found:
        return text
    return f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def keep(folder: pathlib.Path, results: pathlib.Path = RESULTS) -> pathlib.Path:
    result = Result.read(folder)
    facts = result.head["environment"]
    name = "bench_zoo" if result.head["options"].get("suite") == "zoo" else "bench_cpu"
    if facts["gpu"] is not None:
        gpu = re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower()).strip("-")
        name = f"bench_gpu_{gpu}_{facts['date'][:10]}"
    results.mkdir(parents=True, exist_ok=True)
    target = results / f"{name}.jsonl"
    result.write(target)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme_table")
    parser.add_argument("--keep", metavar="DIR", help="a result directory of graphfsdp bench")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        print(f"kept as {keep(pathlib.Path(options.keep))}")
    for document in DOCUMENTS:
        document.write_text(updated(document.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
