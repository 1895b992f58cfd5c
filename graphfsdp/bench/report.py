"""The directory that keeps a result: JSON, a plot, and a report in Markdown."""

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from graphfsdp.bench.plots import draw
from graphfsdp.bench.records import BenchResult, CaseResult, write_result
from graphfsdp.bench.tables import (
    NOT_MLPERF,
    Table,
    contender_names,
    cpu_overview,
    environment_text,
    not_run_table,
    overview,
    peak_text,
    speed_table,
    start_table,
    workload_text,
)
from graphfsdp.training.run_directory import make_new_directory

RESULT, REPORT = "result.json", "report.md"


def _parts(result: BenchResult, pictures: Sequence[Path]) -> Iterator[str]:
    yield "# graphfsdp bench"
    yield environment_text(result.environment)
    yield _code(result.command)
    yield NOT_MLPERF
    yield from (_titled(made) for made in (overview(result), cpu_overview(result)) if made.rows)
    yield from (f"![{path.name}]({path.name})" for path in pictures)
    for case in result.cases:
        yield f"## {workload_text(case.workload)}"
        yield _titled(speed_table(case))
        yield _titled(start_table(case))
        yield _items(case_notes(case))
        if case.not_run:
            yield _titled(not_run_table(case))
        yield from (_code(f"{item.name}: {item.detail}") for item in case.not_run if item.detail)
    if result.left_out:
        yield "## Left out"
        yield _items([f"{name}: {reason}" for name, reason in result.left_out.items()])
    yield "## Contenders"
    described: dict[str, str] = {}
    for case in result.cases:
        described |= {item.name: item.description for item in case.contenders}
        described |= {item.name: item.description for item in case.not_run}
    names = [name for name in contender_names(result.cases) if name in described]
    yield _items([f"{name}: {described[name]}" for name in names])
    yield "## Run"
    facts = {"environment": asdict(result.environment), "options": dict(result.options)}
    yield _code(json.dumps(facts, indent=1))


def _titled(table: Table) -> str:
    return f"**{table.title}**\n\n{table.markdown()}"


def _code(text: str) -> str:
    return f"```\n{text}\n```"


def _items(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def case_notes(case: CaseResult) -> list[str]:
    workload = case.workload
    notes = [
        f"{workload.num_parameters:,} parameters; {workload.data}; "
        f"{workload.flops_per_step / 1e9:,.3g} GFLOP per step on each rank: "
        f"{workload.flops_formula}; {peak_text(case)}."
    ]
    memories = dict.fromkeys(own.memory.how for own in case.contenders if own.memory)
    notes += [f"peak memory: {how}." for how in memories]
    notes += [f"{own.name}: {note}." for own in case.contenders for note in own.notes]
    return notes


def markdown(result: BenchResult, pictures: Sequence[Path] = ()) -> str:
    """With links to PNG files beside it."""
    return "\n\n".join(_parts(result, pictures)) + "\n"


def make_directory(out: str | None) -> Path:
    """Refuses an impossible one (ConfigError) before anything is measured."""
    if out is None:
        out = str(Path("runs") / f"bench-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    return make_new_directory(out)


def write_directory(result: BenchResult, folder: Path) -> None:
    """May be called again when more is known."""
    write_result(result, folder / RESULT)
    drawn = draw(result, folder)
    (folder / REPORT).write_text(markdown(result, drawn), encoding="utf-8")
