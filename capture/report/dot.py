"""A recorded program in Graphviz's language."""

from collections.abc import Mapping
from typing import Any

_COLOURS = (("forward", "#cfe8ff"), ("backward", "#ffe2c7"), ("optimizer", "#d9f2d0"))
_OWN = ("intermediate", "result", "kept by the model")


def program_dot(report: Mapping[str, Any]) -> str:
    """Return a directed graph: nodes by module, and who reads what whom writes.

    Args:
        report: ``CaptureReport.to_dict()``.
    """
    colours = dict(_COLOURS)
    lines = [
        "digraph iteration {",
        '  graph [rankdir="TB", fontname="Helvetica", nodesep="0.15", ranksep="0.3"];',
        '  node [shape="box", style="filled,rounded", fontname="Helvetica", fontsize="10"];',
        '  edge [color="#888888", fontname="Helvetica", fontsize="8"];',
    ]
    buffers = report["buffers"]
    writer: dict[int, str] = {}  # the last node that wrote a buffer
    for node in report["nodes"]:
        name = f"n{node['index']}"
        where = node["module"] if node["module"] is not None else node["phase"]
        label = _quoted(f"{node['op']}\n{where or '(root module)'}\n{node['results']}")
        lines.append(f'  {name} [label={label}, fillcolor="{colours[node["phase"]]}"];')
        for number in dict.fromkeys((*node["reads"], *node["writes"])):
            buffer = buffers[number]
            if number in writer:
                lines.append(f"  {writer[number]} -> {name} [label={_bytes(buffer)}];")
            elif buffer["role"] not in _OWN:
                source = f"b{number}"
                label = _quoted(f"{buffer['role']}\n{buffer['name']}")
                lines.append(f'  {source} [label={label}, shape="cylinder", fillcolor="#eeeeee"];')
                lines.append(f"  {source} -> {name} [label={_bytes(buffer)}];")
                writer[number] = source
        for number in node["writes"]:
            writer[number] = name
    lines.append("}")
    return "\n".join(lines) + "\n"


def _bytes(buffer: Mapping[str, Any]) -> str:
    return _quoted(f"{buffer['bytes']:,}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
