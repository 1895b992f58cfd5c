"""Nodes, memory and baked numbers as plain data: what JSON, page, trace and drawing are made of."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from graphfsdp._capture.report.program_facts import NodeFacts
from graphfsdp._capture.report.tables import BakedConstant, BufferUse
from graphfsdp.errors import SourceLine


def node_data(nodes: Iterable[NodeFacts], node_us: Sequence[float]) -> list[dict[str, Any]]:
    """Return the nodes; ``us`` is there only where nodes were measured."""
    found = []
    for node in nodes:
        data: dict[str, Any] = {
            "index": node.index,
            "op": node.op,
            "kind": node.kind.value,
            "phase": node.site.phase.value,
            "module": node.site.module,
            "source": _source(node.site.source),
            "results": node.results,
            "arguments": ", ".join(map(str, node.arguments)),
            "reads": list(node.reads),
            "writes": list(node.writes),
            "called": node.called,
        }
        if node.kernels:
            data["kernels"] = list(node.kernels)
        if node_us:
            data["us"] = round(node_us[node.index], 3)
        found.append(data)
    return found


def buffer_data(buffers: Iterable[BufferUse]) -> list[dict[str, Any]]:
    """Return the stretches of memory."""
    return [
        {
            "index": buffer.index,
            "role": buffer.role.value,
            "name": buffer.name,
            "bytes": buffer.num_bytes,
            "first": buffer.first,
            "last": buffer.last,
            "offset": buffer.offset,
        }
        for buffer in buffers
    ]


def baked_data(constants: Iterable[BakedConstant]) -> list[dict[str, Any]]:
    """Return the baked numbers."""
    return [
        {
            "value": constant.value,
            "op": constant.op,
            "argument": constant.argument,
            "phase": constant.phase,
            "module": constant.module,
            "source": _source(constant.source),
            "num_nodes": constant.num_nodes,
        }
        for constant in constants
    ]


def _source(line: SourceLine | None) -> dict[str, Any] | None:
    return None if line is None else dataclasses.asdict(line)
