"""Puts measured numbers into the README, between markers; a test compares the two.

``<!-- bench_cpu: begin -->`` and ``<!-- bench_cpu: end -->`` stand around the tables of
`make bench`, ``bench_gpu`` around those of the newest result of a GPU, ``zoo_speed`` around that
of the small architectures, ``compute_bound_cpu`` around that of larger models, ``overlap_cpu``
around that of overlap and pool, ``gpu_check`` around that of the newest `make gpu-check`.

``python -m benchmarks.readme_table --keep DIR`` first copies result and picture of a result
directory of ``graphfsdp bench`` into benchmarks/results.
"""

import argparse
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.environment import ROOT, slug
from graphfsdp.bench.environment import describe
from graphfsdp.bench.record_files import read_result
from graphfsdp.bench.records import BenchResult
from graphfsdp.bench.result_directory import RESULT
from graphfsdp.bench.spread import Spread
from graphfsdp.bench.tables import Table, cpu_overview, memory_overview, overview, reasons

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PICTURE = "crossover.png"


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; every column but the first two is aligned to the right."""
    rule = tuple("---" if index < 2 else "---:" for index in range(len(heading)))
    return "\n".join("| " + " | ".join(row) + " |" for row in (heading, rule, *rows))


def bench_cpu(results: pathlib.Path) -> str | None:
    """Return the tables of `make bench`, or a sentence without a result."""
    path = results / "bench_cpu.json"
    return bench_section(path) if path.exists() else "Not measured yet: `make bench`."


def bench_gpu(results: pathlib.Path) -> str | None:
    """Return the tables of the newest `graphfsdp bench` on a GPU, or a sentence without one."""
    paths = {read_result(path).environment.date: path for path in results.glob("bench_gpu_*.json")}
    return bench_section(paths[max(paths)]) if paths else "No GPU has been measured yet."


def bench_section(path: pathlib.Path) -> str:
    """Return speed, memory, what did not run, and on what all of it was measured."""
    result = read_result(path)
    parts = [f"{title_of(table)}\n\n{table.markdown()}" for table in bench_tables(result)]
    picture = path.with_suffix(".png")
    if picture.exists():
        parts.append(f"![speed over tokens per step]({picture.relative_to(picture.parents[2])})")
    missing: dict[str, list[str]] = {}
    for name, reason in reasons(result).items():
        missing.setdefault(reason.rstrip("."), []).append(f"`{name}`")
    if missing:
        texts = (f"{', '.join(names)}: {reason}" for reason, names in missing.items())
        parts.append("Did not run: " + "; ".join(texts) + ".")
    if result.left_out:
        cases = (f"{name}: {reason}" for name, reason in result.left_out.items())
        parts.append("Left out: " + "; ".join(cases) + ".")
    return "\n\n".join((*parts, describe(result.environment)))


def bench_tables(result: BenchResult) -> list[Table]:
    """Return the tables of one result that the README shows."""
    tables = [overview(result), cpu_overview(result), memory_overview(result)]
    return [table for table in tables if table.rows]


def title_of(table: Table) -> str:
    """Return a table's title as a sentence that introduces it."""
    return table.title[0].upper() + table.title[1:] + ":"


def zoo_speed(results: pathlib.Path) -> str | None:
    """Return the table of ``python -m benchmarks.zoo_speed``, or a sentence without a result."""
    path = results / "zoo_speed.json"
    if not path.exists():
        return "Not measured yet: `python -m benchmarks.zoo_speed`."
    document: dict[str, Any] = json.loads(path.read_text())
    rows: list[tuple[str, ...]] = [
        (
            result["name"],
            str(result["num_ops"]),
            f"{result['pytorch_ms']:.2f}",
            f"{result['eager_ms']:.2f}",
            f"{result['replay_ms']:.2f}",
            str(Spread(**result["speedup_over_pytorch"])),
            str(Spread(**result["speedup"])),
        )
        for result in document["architectures"]
    ]
    means = (f"{mean:.2f}" for mean in document["geometric_mean"].values())
    rows.append(("geometric mean", "", "", "", "", *means))
    facts = document["environment"]
    heading = (
        "architecture (width 32, 4 rows)",
        "operators",
        "PyTorch ms/step",
        "eager ms/step",
        "ms/step",
        "times as fast as PyTorch: median (min to max)",
        "times as fast as eager",
    )
    note = (
        "PyTorch is a plain loop with AdamW(fused=True) and clip_grad_norm_; eager is "
        '`scope="none"`, the same code as the replay. '
        f"Measured {facts['date']} on one thread of {facts['cpu']} ({facts['num_cpus']} cores), "
        f"torch {facts['torch']}, Python {facts['python']}; {document['num_rounds']} pairs each. "
        f"Other programs ran meanwhile (load average {document['load_average_before']:.1f} at the "
        "start). Losses of eager and replay were equal bit for bit."
    )
    return f"{markdown(heading, rows)}\n\n{note}"


def overlap_cpu(results: pathlib.Path) -> str | None:
    """Return the table of ``python -m benchmarks.overlap``, or a sentence without a result."""
    path = results / "overlap_cpu.json"
    if not path.exists():
        return "Not measured yet: `python -m benchmarks.overlap`."
    document: dict[str, Any] = json.loads(path.read_text())
    rows = [
        (result["name"], name, found["reference"], str(Spread(**found["speedup"])))
        for result in document["workloads"]
        for name, found in result["contenders"].items()
        if found["speedup"] is not None
    ]
    facts = document["environment"]
    first = document["workloads"][0]
    heading = ("model", "ZeRO-3", "beside", "times as fast: median (min to max)")
    note = (
        f"Measured {facts['date']} with {first['num_ranks']} gloo ranks of one thread each on "
        f"{facts['cpu']} ({facts['num_cpus']} cores), torch {facts['torch']}; "
        f"{first['num_rounds']} pairs each. Other programs ran meanwhile (load average "
        f"{document['load_average_before']:.1f} at the start). Losses were equal bit for bit."
    )
    return f"{markdown(heading, rows)}\n\n{note}"


def compute_bound_cpu(results: pathlib.Path) -> str | None:
    """Return the table of ``python -m benchmarks.compute_bound``, or a sentence without one."""
    path = results / "compute_bound_cpu.json"
    if not path.exists():
        return "Not measured yet: `python -m benchmarks.compute_bound`."
    document: dict[str, Any] = json.loads(path.read_text())
    rows = [
        (
            f"{result['workload']}, {result['shape']} tokens",
            *(f"{ms:.0f}" for ms in result["processor_ms"].values()),
            *(str(Spread(**result[key])) for key in ("over_pytorch", "over_eager")),
        )
        for result in document["models"]
    ]
    facts = document["environment"]
    heading = ("model", "PyTorch ms", "eager ms", "replay ms", "over PyTorch", "over eager")
    note = (
        f"Processor time of a step on one thread, {facts['date']}, {facts['cpu']} "
        f"({facts['num_cpus']} cores), torch {facts['torch']}; median (min to max) of pairs."
    )
    return f"{markdown(heading, rows)}\n\n{note}"


def gpu_check(results: pathlib.Path) -> str | None:
    """Return the table of the newest `make gpu-check`, or a sentence where there is none.

    Its groups may have run one by one: those of one GPU and one day belong together.
    """
    paths = sorted(results.glob("gpu_check_*.json"))
    documents = [json.loads(path.read_text()) for path in paths]
    documents = [found for found in documents if found["environment"]["gpu"]]
    if not documents:
        return "No GPU has been measured yet."
    newest = max(documents, key=lambda found: str(found["environment"]["date"]))
    rows = [
        (part["name"], row["what"], row["result"], "yes" if row["ok"] else "**no**")
        for found in documents
        if all(found["environment"][key] == newest["environment"][key] for key in ("gpu", "date"))
        for part in found["parts"]
        for row in part["rows"]
    ]
    facts = newest["environment"]
    note = (
        f"Measured {facts['date']} on one {facts['gpu']}, driver {facts['driver']}, "
        f"torch {facts['torch']}, Triton {facts['triton']}, Python {facts['python']}."
    )
    return f"{markdown(('part', 'what', 'result', 'good'), rows)}\n\n{note}"


SECTIONS: Mapping[str, Callable[[pathlib.Path], str | None]] = {
    "bench_cpu": bench_cpu,
    "bench_gpu": bench_gpu,
    "zoo_speed": zoo_speed,
    "compute_bound_cpu": compute_bound_cpu,
    "gpu_check": gpu_check,
    "overlap_cpu": overlap_cpu,
}


def updated(text: str, results: pathlib.Path = RESULTS) -> str:
    """Return ``text`` with the present numbers between its markers."""
    for name, make in SECTIONS.items():
        table = make(results)
        if table is not None:
            begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
            pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
            block = f"{begin}\n{table}\n{end}"
            text = pattern.sub(lambda _, block=block: block, text)  # type: ignore[misc]
    return text


def keep(folder: pathlib.Path, results: pathlib.Path = RESULTS) -> pathlib.Path:
    """Copy result and picture of a result directory to where the README's numbers come from."""
    facts = read_result(folder).environment
    name = "bench_cpu"
    if facts.gpu is not None:
        name = f"bench_gpu_{slug(facts.gpu)}_{facts.date[:10]}"
    results.mkdir(parents=True, exist_ok=True)
    target = results / f"{name}.json"
    shutil.copyfile(folder / RESULT, target)
    picture = folder / PICTURE
    target.with_suffix(".png").unlink(missing_ok=True)
    if picture.exists():
        shutil.copyfile(picture, target.with_suffix(".png"))
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the README's tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme_table")
    parser.add_argument("--keep", metavar="DIR", help="a result directory of graphfsdp bench")
    folder = parser.parse_args(arguments).keep
    if folder is not None:
        print(f"kept as {keep(pathlib.Path(folder))}")
    text = README.read_text(encoding="utf-8")
    if not any(f"<!-- {name}: begin -->" in text for name in SECTIONS):
        markers = ", ".join(f"<!-- {name}: begin --> ... <!-- {name}: end -->" for name in SECTIONS)
        print(f"README.md has no place for the numbers; put one of these in: {markers}")
        return 2
    README.write_text(updated(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
