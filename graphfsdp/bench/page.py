"""A result as one HTML page that needs no network: tables, and the pictures inside it."""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from graphfsdp.bench.environment import describe
from graphfsdp.bench.records import BenchResult
from graphfsdp.bench.tables import (
    NOT_MLPERF,
    Table,
    case_notes,
    cpu_overview,
    not_run_table,
    overview,
    speed_table,
    start_table,
)
from graphfsdp.bench.words import workload_text

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
pre, code { background: #f4f4f4; font-size: 13px }
pre { padding: .8em; overflow-x: auto }
.note { color: #555; font-size: 13px }
"""


def page(result: BenchResult, pictures: Sequence[Path]) -> str:
    """Return the page.

    Args:
        result: What was measured.
        pictures: PNG files; they go into the page.
    """
    parts = [
        "<h1>graphfsdp bench</h1>",
        f"<p>{_text(describe(result.environment))}</p>",
        f"<pre>{_text(result.command)}</pre>",
        f"<p class='note'>{_text(NOT_MLPERF)}</p>",
        "<h2>Overview</h2>",
        *(_table(table) for table in (overview(result), cpu_overview(result)) if table.rows),
        *(_picture(path) for path in pictures),
    ]
    for case in result.cases:
        parts += [f"<h2>{_text(workload_text(case.workload))}</h2>"]
        parts += [_table(speed_table(case)), _table(start_table(case))]
        parts += [f"<p class='note'>{_text(note)}</p>" for note in case_notes(case)]
        if case.not_run:
            parts.append(_table(not_run_table(case)))
            parts += [
                f"<details><summary>{_text(item.name)}</summary><pre>{_text(item.detail)}</pre>"
                "</details>"
                for item in case.not_run
                if item.detail
            ]
    if result.left_out:
        items = "".join(f"<li>{_text(f'{k}: {v}')}</li>" for k, v in result.left_out.items())
        parts.append(f"<h2>Left out</h2><ul>{items}</ul>")
    facts = {"environment": asdict(result.environment), "options": dict(result.options)}
    parts.append(f"<h2>Run</h2><pre>{_text(json.dumps(facts, indent=1))}</pre>")
    body = "\n".join(parts)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'><title>graphfsdp bench</title>"
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        made = (
            f"<{tag}{' class=left' if index < table.num_left else ''}>{_text(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )
        return f"<tr>{''.join(made)}</tr>"

    rows = "".join(row(cells, "td") for cells in table.rows)
    return (
        f"<p>{_text(table.title)}</p><div class='wide'><table>"
        f"<thead>{row(table.heading, 'th')}</thead><tbody>{rows}</tbody></table></div>"
    )


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"<p><img alt='{_text(path.stem)}' src='data:image/png;base64,{data}'></p>"


def _text(text: str) -> str:
    return html.escape(text)
