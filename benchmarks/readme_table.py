"""Puts numbers into the README and the docs, between markers; a test compares them.

``<!-- bench_cpu: begin -->`` and ``<!-- bench_cpu: end -->`` stand around the tables of
`make bench`, ``bench_zoo`` around those of ``graphfsdp bench --suite zoo``, ``bench_gpu`` around
those of the newest result of a GPU, ``gpu_check`` around that of the newest `make gpu-check`,
and ``speed_summary`` around the geometric means of the first two, which is what the README shows.

``python -m benchmarks.readme_table --keep DIR`` first copies result and plot of a result directory
of ``graphfsdp bench`` into benchmarks/results.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from benchmarks.gpu_check import described, table_of
from graphfsdp.bench.plots import PLOT
from graphfsdp.bench.records import REFERENCE, BenchResult, read_result
from graphfsdp.bench.report import RESULT
from graphfsdp.bench.tables import (
    Table,
    contender_names,
    cpu_overview,
    environment_text,
    memory_overview,
    overview,
    reasons,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "speed.md")
# The columns of the README's summary, and whose they are.
SUMMARY = MappingProxyType(
    {
        "plain PyTorch": "pytorch",
        "torch.compile": "compile",
        "graphfsdp, one graph": "full_iteration",
        "the same, compiled": "compiled_recording",
    }
)


def measured(name: str, command: str, results: pathlib.Path) -> str:
    path = results / f"{name}.json"
    return bench_section(path) if path.exists() else f"Not measured yet: `{command}`."


bench_cpu = functools.partial(measured, "bench_cpu", "make bench")
bench_zoo = functools.partial(measured, "bench_zoo", "graphfsdp bench --suite zoo")


def bench_gpu(results: pathlib.Path) -> str:
    paths = {read_result(path).environment.date: path for path in results.glob("bench_gpu_*.json")}
    return bench_section(paths[max(paths)]) if paths else "No GPU has been measured yet."


def bench_section(path: pathlib.Path) -> str:
    result = read_result(path)
    tables = (overview(result), cpu_overview(result), memory_overview(result))
    parts = [
        f"{table.title[0].upper()}{table.title[1:]}:\n\n{table.markdown()}"
        for table in tables
        if table.rows
    ]
    parts += geometric_means(result)
    picture = path.with_suffix(".png")
    if picture.exists():
        parts.append(f"![speed over tokens per step](../{picture.relative_to(picture.parents[2])})")
    missing: dict[str, list[str]] = {}
    for name, reason in reasons(result).items():
        missing.setdefault(reason.rstrip("."), []).append(f"`{name}`")
    if missing:
        texts = (f"{', '.join(names)}: {reason}" for reason, names in missing.items())
        parts.append("Did not run: " + "; ".join(texts) + ".")
    if result.left_out:
        cases = (f"{name}: {reason}" for name, reason in result.left_out.items())
        parts.append("Left out: " + "; ".join(cases) + ".")
    return "\n\n".join((*parts, environment_text(result.environment)))


def speedups(result: BenchResult) -> dict[str, float]:
    """Return the geometric means over eager of the contenders that ran in every case."""
    means = {}
    for name in contender_names(result.cases):
        medians = [spread.median for case in result.cases if (spread := case.speedup(name))]
        if name != REFERENCE and len(medians) == len(result.cases):
            means[name] = statistics.geometric_mean(medians)
    return means


def geometric_means(result: BenchResult) -> list[str]:
    means = [f"{name} {mean:.2f}x" for name, mean in speedups(result).items()]
    if len(result.cases) < 2 or not means:
        return []
    return [f"Geometric means, times as fast as eager: {', '.join(means)}."]


def speed_summary(results: pathlib.Path) -> str:
    rows = []
    for name, what in (
        ("bench_cpu", "workloads of `make bench`, launch-bound and compute-bound"),
        ("bench_zoo", "small architectures, launch-bound"),
    ):
        path = results / f"{name}.json"
        if path.exists():
            result = _with_all(read_result(path), SUMMARY.values())
            means = speedups(result)
            shown = (f"{means[key]:.2f}x" if key in means else "-" for key in SUMMARY.values())
            rows.append((f"{len(result.cases)} {what}", *shown))
    heading = ("times as fast as our eager code, geometric mean, on a CPU", *SUMMARY)
    return Table("", heading, tuple(rows)).markdown() if rows else "Not measured yet: `make bench`."


def _with_all(result: BenchResult, names: Iterable[str]) -> BenchResult:
    """Return the cases in which all of these ran that ran in any."""
    ran = [name for name in names if any(case.speedup(name) for case in result.cases)]
    cases = tuple(case for case in result.cases if all(map(case.speedup, ran)))
    return dataclasses.replace(result, cases=cases)


def gpu_check(results: pathlib.Path) -> str:
    """Its groups may have run one by one: those of one GPU and one day belong together."""
    documents = [json.loads(path.read_text()) for path in sorted(results.glob("gpu_check_*.json"))]
    documents = [found for found in documents if found["environment"]["gpu"]]
    if not documents:
        return "No GPU has been measured yet."

    def run_of(found: Mapping[str, Mapping[str, str]]) -> tuple[str, str]:
        return found["environment"]["date"][:10], found["environment"]["gpu"]

    newest = max(documents, key=run_of)
    parts = [
        part for found in documents if run_of(found) == run_of(newest) for part in found["parts"]
    ]
    text = described(newest["environment"])
    return f"{table_of({**newest, 'parts': parts}).markdown()}\n\n{text[0].upper()}{text[1:]}."


SECTIONS: Mapping[str, Callable[[pathlib.Path], str]] = {
    "bench_cpu": bench_cpu,
    "bench_gpu": bench_gpu,
    "bench_zoo": bench_zoo,
    "gpu_check": gpu_check,
    "speed_summary": speed_summary,
}


def updated(text: str, results: pathlib.Path = RESULTS) -> str:
    for name, make in SECTIONS.items():
        text = with_section(text, name, functools.partial(make, results))
    return text


def with_section(text: str, name: str, make: Callable[[], str]) -> str:
    """Put what ``make`` returns between the markers of that name, if there are any."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    if not found:
        return text
    return f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"


def keep(folder: pathlib.Path, results: pathlib.Path = RESULTS) -> pathlib.Path:
    result = read_result(folder)
    facts = result.environment
    name = "bench_zoo" if result.options.get("suite") == "zoo" else "bench_cpu"
    if facts.gpu is not None:
        gpu = re.sub(r"[^a-z0-9]+", "-", facts.gpu.lower()).strip("-")
        name = f"bench_gpu_{gpu}_{facts.date[:10]}"
    results.mkdir(parents=True, exist_ok=True)
    target = results / f"{name}.json"
    shutil.copyfile(folder / RESULT, target)
    target.with_suffix(".png").unlink(missing_ok=True)
    if (folder / PLOT).exists() and name != "bench_zoo":  # of which all are of one size
        shutil.copyfile(folder / PLOT, target.with_suffix(".png"))
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme_table")
    parser.add_argument("--keep", metavar="DIR", help="a result directory of graphfsdp bench")
    folder = parser.parse_args(arguments).keep
    if folder is not None:
        print(f"kept as {keep(pathlib.Path(folder))}")
    for document in DOCUMENTS:
        document.write_text(updated(document.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
