"""The directory that keeps a result: JSON, plots, and the same report in Markdown and HTML."""

import base64
import datetime
import html
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from graphfsdp.bench.plots import draw_all
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
from graphfsdp.errors import ConfigError
from graphfsdp.training.run_directory import refuse_used_directory

PROFILES = "profile"
RESULT, REPORT, PAGE = "result.json", "report.md", "report.html"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em;
  color: #1b1b1b; background: #fff }
table { border-collapse: collapse; margin: .6em 0 1.2em; font-size: 13px }
th, td { border-bottom: 1px solid #ddd; padding: .25em .6em; text-align: right;
  font-variant-numeric: tabular-nums }
th { border-bottom: 2px solid #999; vertical-align: bottom }
.left { text-align: left }
.wide { overflow-x: auto }
img { max-width: 100% }
pre { background: #f4f4f4; font-size: 13px; padding: .8em; overflow-x: auto }
"""


@dataclass(frozen=True)
class _Form:
    """How the parts of a report are written: a heading by its level, a list item by item."""

    heading: Callable[[str, int], str]
    text: Callable[[str], str]
    code: Callable[[str], str]
    items: Callable[[Sequence[str]], str]
    table: Callable[[Table], str]
    picture: Callable[[Path], str]


_MARKDOWN = _Form(
    heading=lambda text, level: f"{'#' * level} {text}",
    text=lambda text: text,
    code=lambda text: f"```\n{text}\n```",
    items=lambda items: "\n".join(f"- {item}" for item in items),
    table=lambda table: f"**{table.title}**\n\n{table.markdown()}",
    picture=lambda path: f"![{path.name}]({path.name})",
)


def _embedded(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"<p><img alt='{html.escape(path.stem)}' src='data:image/png;base64,{data}'></p>"


_HTML = _Form(
    heading=lambda text, level: f"<h{level}>{html.escape(text)}</h{level}>",
    text=lambda text: f"<p>{html.escape(text)}</p>",
    code=lambda text: f"<pre>{html.escape(text)}</pre>",
    items=lambda items: f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>",
    table=lambda table: f"<p>{html.escape(table.title)}</p><div class='wide'>{table.html()}</div>",
    picture=_embedded,
)


def _parts(result: BenchResult, pictures: Sequence[Path], form: _Form) -> Iterator[str]:
    yield form.heading("graphfsdp bench", 1)
    yield form.text(environment_text(result.environment))
    yield form.code(result.command)
    yield form.text(NOT_MLPERF)
    yield from (form.table(made) for made in (overview(result), cpu_overview(result)) if made.rows)
    yield from map(form.picture, pictures)
    for case in result.cases:
        yield form.heading(workload_text(case.workload), 2)
        yield form.table(speed_table(case))
        yield form.table(start_table(case))
        yield form.items(case_notes(case))
        if case.not_run:
            yield form.table(not_run_table(case))
        yield from (
            form.code(f"{item.name}: {item.detail}") for item in case.not_run if item.detail
        )
    if result.left_out:
        yield form.heading("Left out", 2)
        yield form.items([f"{name}: {reason}" for name, reason in result.left_out.items()])
    yield form.heading("Contenders", 2)
    described: dict[str, str] = {}
    for case in result.cases:
        described |= {item.name: item.description for item in case.contenders}
        described |= {item.name: item.description for item in case.not_run}
    names = [name for name in contender_names(result.cases) if name in described]
    yield form.items([f"{name}: {described[name]}" for name in names])
    yield form.heading("Run", 2)
    facts = {"environment": asdict(result.environment), "options": dict(result.options)}
    yield form.code(json.dumps(facts, indent=1))


def case_notes(case: CaseResult) -> list[str]:
    workload = case.workload
    notes = [
        f"{workload.num_parameters:,} parameters; {workload.data}; "
        f"{workload.flops_per_step / 1e9:,.3g} GFLOP per step on each rank: "
        f"{workload.flops_formula}; {peak_text(case)}."
    ]
    rooflines = dict.fromkeys(own.roofline.how for own in case.contenders if own.roofline)
    notes += [f"kernels ms: {how}." for how in rooflines]
    memories = dict.fromkeys(own.memory.how for own in case.contenders if own.memory)
    notes += [f"peak memory: {how}." for how in memories]
    notes += [f"{own.name}: {note}." for own in case.contenders for note in own.notes]
    return notes


def markdown(result: BenchResult, pictures: Sequence[Path] = ()) -> str:
    """With links to PNG files beside it."""
    return "\n\n".join(_parts(result, pictures, _MARKDOWN)) + "\n"


def page(result: BenchResult, pictures: Sequence[Path] = ()) -> str:
    """Needs no network: the PNG files go into it."""
    body = "\n".join(_parts(result, pictures, _HTML))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'><title>graphfsdp bench</title>"
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def make_directory(out: str | None) -> Path:
    """Refuses an impossible one (ConfigError) before anything is measured."""
    if out is None:
        out = str(Path("runs") / f"bench-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    refuse_used_directory(out)
    path = Path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be made ({error.strerror or error}); give a directory that can"
        ) from None
    return path


def write_directory(result: BenchResult, folder: Path, *, plots: bool = True) -> None:
    """May be called again when more is known."""
    write_result(result, folder / RESULT)
    drawn = draw_all(result, folder) if plots else []
    (folder / REPORT).write_text(markdown(result, drawn), encoding="utf-8")
    (folder / PAGE).write_text(page(result, drawn), encoding="utf-8")
