"""The report as one HTML page that needs nothing else."""

import html
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

_PARTS = ("page.css", "page.js")


def report_page(report: Mapping[str, Any]) -> str:
    """Return the page: styles, program and data are inside it, nothing is loaded.

    Args:
        report: ``CaptureReport.to_dict()``.
    """
    folder = importlib.resources.files("graphfsdp._capture.report") / "page"
    page = (folder / "page.html").read_text(encoding="utf-8")
    for part in _PARTS:
        page = page.replace(f"@@{part}@@", (folder / part).read_text(encoding="utf-8"))
    title = html.escape(f"graphfsdp: {report['num_nodes']} nodes, {report['scope']}")
    # "</script>" and "<!--" inside a string would end the script element.
    data = json.dumps(report, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("@@title@@", title).replace("@@data@@", data)
