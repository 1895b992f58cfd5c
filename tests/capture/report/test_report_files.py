"""The report as JSON, page and trace."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

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


def test_the_page_needs_a_graph(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    step = graphfsdp.capture(model, FusedAdam(model.parameters()))
    with pytest.raises(graphfsdp.PhaseError, match=r"no graph .*phase warmup.*4 calls|captured"):
        step.report().html(tmp_path / "file")
    assert not (tmp_path / "file").exists()
    assert json.loads(step.report().to_json())["nodes"] == []
