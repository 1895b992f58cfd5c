"""The report as JSON, page and trace."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam

VOID = ("meta", "input", "br", "link")


class Odd(nn.Module):
    """A module whose name and arguments would break a careless page."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"</script><b>": nn.Linear(4, 4), 'quote"': nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for module in self.body.values():
            x = nn.functional.gelu(module(x), approximate="tanh")
        return x.square().mean()


@pytest.fixture(scope="module")
def report() -> Iterator[graphfsdp.CaptureReport]:
    model = Odd()
    with graphfsdp.capture(model, FusedAdam(model.parameters()), max_grad_norm=1.0) as step:
        for _ in range(5):
            step(torch.randn(3, 4))
        yield step.report(measure=True)


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects scripts and references."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "data", "action"):
                self.loads.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data


def test_json_holds_everything_and_reads_back(
    report: graphfsdp.CaptureReport, tmp_path: Path
) -> None:
    text = report.to_json(tmp_path / "report.json", indent=1)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data == json.loads(text) == report.to_dict()
    assert data["num_nodes"] == len(data["nodes"]) == len(data["live_bytes"])
    assert data["measured"] is True
    modules = {node["module"] for node in data["nodes"]}
    assert {"body.</script><b>", 'body.quote"', "", None} >= modules
    assert len(modules) == 4
    for index, node in enumerate(data["nodes"]):
        assert node["index"] == index
        for number in (*node["reads"], *node["writes"]):
            buffer = data["buffers"][number]
            assert buffer["index"] == number
            assert buffer["first"] <= index <= buffer["last"]


def test_page_is_well_formed_and_loads_nothing(
    report: graphfsdp.CaptureReport, tmp_path: Path
) -> None:
    report.html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.loads == []
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|@@", text)
    assert len(set(page.ids)) == len(page.ids)
    data, program = page.scripts
    assert json.loads(data) == report.to_dict()
    named = set(re.findall(r'\$\("([a-z-]+)"\)', program))
    assert named
    assert named <= set(page.ids)
    assert "prefers-color-scheme: dark" in text
    if shutil.which("node"):
        (tmp_path / "page.js").write_text(program)
        subprocess.run(["node", "--check", "page.js"], cwd=tmp_path, check=True)


def test_trace_has_every_node_in_order_inside_its_module_and_phase(
    report: graphfsdp.CaptureReport, tmp_path: Path
) -> None:
    report.chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all({"name", "pid", "tid", "ts", "dur"} <= set(event) for event in slices)

    def track(number: int) -> list[dict[str, Any]]:
        return [event for event in slices if event["tid"] == number]

    phases, modules, nodes = track(0), track(1), track(2)
    names = [event["name"] for event in phases]
    assert names == ["forward", "backward", "forward", "optimizer"]  # the copy of the loss
    assert [event["name"] for event in nodes] == [node.op for node in report.nodes()]
    for events in (phases, modules, nodes):
        ends = [event["ts"] + event["dur"] for event in events]
        starts = [event["ts"] for event in events]
        assert all(start >= end - 0.01 for start, end in zip(starts[1:], ends, strict=False))
    total = sum(event["dur"] for event in nodes)
    # Viewers drop what has no duration, so a node that is not called gets a nanosecond.
    assert total == pytest.approx(sum(report.node_us), abs=0.01 * len(nodes))
    assert sum(event["dur"] for event in phases) == pytest.approx(total, abs=0.1)
    assert "body.</script><b>" in {event["name"] for event in modules}
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert report.pool is not None
    assert max(event["args"]["bytes"] for event in counters) == report.pool.peak_bytes
    assert "measured" in trace["otherData"]["durations"]


@pytest.mark.parametrize("method", ["html", "chrome_trace"])
def test_files_need_a_graph(method: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    step = graphfsdp.capture(model, FusedAdam(model.parameters()))
    with pytest.raises(graphfsdp.PhaseError, match=r"no graph .*phase warmup.*4 calls|captured"):
        getattr(step.report(), method)(tmp_path / "file")
    assert not (tmp_path / "file").exists()
    assert json.loads(step.report().to_json())["nodes"] == []
