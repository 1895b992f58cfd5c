"""The report as files for a browser: a page of its own, and a trace for Perfetto."""

import html
import importlib.resources
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PAGE_PARTS = ("page.css", "page.js")
_NODE_US = 1.0  # what a node lasts where none was measured
_SHORTEST_US = 0.001  # viewers drop events without a duration
_PROCESS = 1
_TRACKS = ("phases", "modules", "nodes")


def report_page(report: Mapping[str, Any]) -> str:
    """Return the page of ``CaptureReport.to_dict()``; styles, program and data are inside it."""
    folder = importlib.resources.files("graphfsdp._capture.report") / "page"
    page = (folder / "page.html").read_text(encoding="utf-8")
    for part in _PAGE_PARTS:
        page = page.replace(f"@@{part}@@", (folder / part).read_text(encoding="utf-8"))
    title = html.escape(f"graphfsdp: {report['num_nodes']} nodes, {report['scope']}")
    # "</script>" and "<!--" inside a string would end the script element.
    data = json.dumps(report, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("@@title@@", title).replace("@@data@@", data)


def chrome_trace(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of ``CaptureReport.to_dict()`` as a JSON object."""
    nodes: Sequence[Mapping[str, Any]] = report["nodes"]
    starts = [0.0]
    for node in nodes:
        starts.append(starts[-1] + max(node.get("us", _NODE_US), _SHORTEST_US))
    events: list[dict[str, Any]] = [_meta("process_name", 0, f"graphfsdp {report['backend']}")]
    for number, track in enumerate(_TRACKS):
        events.append(_meta("thread_name", number, track))
        events.append(_meta("thread_sort_index", number, number))
    events.extend(_ranges(nodes, starts, "phase", 0))
    events.extend(_ranges(nodes, starts, "module", 1))
    for node, start, end in zip(nodes, starts, starts[1:], strict=False):
        arguments = {key: value for key, value in node.items() if key not in ("op", "us")}
        events.append(_slice(node["op"], node["kind"], 2, start, end, arguments))
    for start, live in zip(starts, report["live_bytes"], strict=False):
        sizes = {"bytes": live}
        events.append(
            {"ph": "C", "name": "live memory", "pid": _PROCESS, "ts": start, "args": sizes}
        )
    measured = bool(nodes) and "us" in nodes[0]
    about = {
        "program": "graphfsdp",
        "scope": report["scope"],
        "durations": "measured: median of a few replays" if measured else "not measured: 1 us each",
    }
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _ranges(
    nodes: Sequence[Mapping[str, Any]], starts: Sequence[float], key: str, track: int
) -> Iterator[dict[str, Any]]:
    """Yield a slice for each run of nodes that agree in ``key``."""
    first = 0
    for index in range(1, len(nodes) + 1):
        if index < len(nodes) and nodes[index][key] == nodes[first][key]:
            continue
        name = nodes[first][key]
        if name is not None:
            about = {"num_nodes": index - first}
            shown = name or "(root module)"
            yield _slice(shown, key, track, starts[first], starts[index], about)
        first = index


def _slice(
    name: str, category: str, track: int, start: float, end: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": _PROCESS,
        "tid": track,
        "ts": round(start, 3),
        "dur": round(end - start, 3),
        "args": dict(args),
    }


def _meta(kind: str, track: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if kind.endswith("sort_index") else "name"
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {key: value}}
