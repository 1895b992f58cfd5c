"""The facts that a captured step tells of itself, also of a sharded one; as text, JSON and page."""

import dataclasses
import gc
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from cpu_recording import record
from graphfsdp.optim import FusedAdam
from helpers import line_of
from make_step import make_step
from ranks import on_ranks
from sharding_helpers import adam, batches, make_net, my_part

CPU = torch.device("cpu")


def captured(device: torch.device = CPU, num_calls: int = 5) -> graphfsdp.CapturedStep:
    step, _, _, next_batch = make_step(device, "gpt", max_grad_norm=1.0)
    for _ in range(num_calls):
        step(*next_batch())
    return step


def test_report_of_a_step_that_has_not_run(device: torch.device, tmp_path: Path) -> None:
    step, model, _, _ = make_step(device, "gpt")
    report = step.report()
    assert report.backend == device.type
    assert report.scope == "full_iteration"
    assert report.phase == "warmup"
    assert report.num_captures == 0
    assert report.num_nodes is None
    assert report.capture_ms is None
    assert report.static_input_bytes == 0
    assert report.inputs == {}
    assert report.without_gradient == ()
    numel = sum(param.numel() for param in model.parameters())
    assert 4 * numel <= report.gradient_bytes < 4 * numel + 16 * len(list(model.parameters()))
    assert "none yet" in str(report)
    assert "graph:" not in str(report)
    with pytest.raises(graphfsdp.PhaseError, match=r"no graph .*phase warmup.*4 calls|captured"):
        report.html(tmp_path / "file")
    assert not (tmp_path / "file").exists()
    assert json.loads(report.to_json())["nodes"] == []


def test_report_of_a_captured_step(device: torch.device) -> None:
    report = captured(device, 9).report()
    assert report.phase == "replay"
    assert report.num_calls == {"warmup": 3, "capture": 1, "replay": 5}
    assert report.num_captures == 1
    assert report.capture_ms is not None
    assert report.capture_ms > 0
    assert report.warmup_ms > 0
    assert report.num_ops is not None
    assert report.num_ops > 50
    assert report.static_input_bytes == 2 * 12 * 6 * 8
    its_device = torch.empty(0, device=device).device
    assert report.inputs == {
        f"args[{index}]": f"a torch.int64 tensor of shape (12, 6) on {its_device}"
        for index in range(2)
    }
    assert report.num_escapes == 0
    text = str(report)
    assert "calls:             3 warmup, 1 capture, 5 replay" in text
    assert "static inputs:     1,152 bytes" in text
    if device.type == "cpu":
        assert report.num_nodes == sum(report.op_counts.values())
        assert report.num_nodes is not None
        assert report.num_nodes <= report.num_ops
        assert report.op_counts["graphfsdp.fused_adam_.default"] == 1
        assert report.op_counts["aten.native_layer_norm.default"] == 5
        assert f"graph:             {report.num_nodes} nodes" in text
    assert report.pool_bytes > 0
    assert "private pool" in text
    again = captured(device, 4).report()
    assert (again.num_nodes, again.num_ops) == (report.num_nodes, report.num_ops)


def test_a_report_is_frozen_of_its_moment_and_outlives_its_step() -> None:
    step, _, _, next_batch = make_step(CPU, "gpt")
    early = step.report()
    for _ in range(5):
        step(*next_batch())
    assert early.num_calls == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        early.phase = "replay"  # type: ignore[misc]
    report = step.report()
    text = report.to_json()
    step.close()
    assert step.report().num_calls == {"warmup": 3, "capture": 1, "replay": 1}
    assert step.report().phase == "closed"
    del step
    assert report.to_json() == text


def test_report_names_the_memory_that_nodes_touch() -> None:
    buffers = captured().report().buffers()
    names = {buffer.name: buffer for buffer in buffers}
    assert names["blocks.0.attention.qkv.weight"].role.name == "PARAMETER"
    assert names["gradient of blocks.0.attention.qkv.weight"].role.name == "GRADIENT"
    assert names["args[0]"].role.name == "INPUT"
    assert names["args[0]"].num_bytes == 12 * 6 * 8
    assert [buffer for buffer in buffers if buffer.role.name == "OTHER"] == []
    params = [buffer.num_bytes for buffer in buffers if buffer.role.name == "PARAMETER"]
    states = [buffer.num_bytes for buffer in buffers if buffer.role.name == "STATE"]
    assert sum(states) >= 2 * sum(params)  # two moments, and steps
    results = [buffer for buffer in buffers if buffer.role.name == "OUTPUT"]
    assert [buffer.num_bytes for buffer in results] == [4, 4]  # the loss and the norm


def test_report_counts_nodes_by_kind_phase_and_module() -> None:
    report = captured().report()
    for groups in (report.by_kind, report.by_phase, report.by_module):
        assert sum(sum(counts.values()) for counts in groups.values()) == report.num_nodes
    assert list(report.by_phase) == ["forward", "backward", "optimizer"]
    assert report.by_phase["optimizer"]["graphfsdp.fused_adam_.default"] == 1
    assert report.by_module["blocks.0.attention_norm"] == {
        "aten.native_layer_norm.default": 1,
        "aten.native_layer_norm_backward.default": 1,
        "aten.add.Tensor": 1,
        "aten.copy_.default": 2,
    }
    assert set(report.by_kind) == {"compute", "random", "view"}
    assert sum(report.by_kind["random"].values()) == 5  # one for each dropout
    text = str(report)
    assert "  by phase:          " in text
    assert " backward, " in text


def test_report_tells_how_the_memory_of_the_iteration_is_reused() -> None:
    report = captured().report()
    assert report.program is not None
    own = [b for b in report.buffers() if b.role.name in ("INTERMEDIATE", "OUTPUT")]
    planned = [buffer for buffer in own if buffer.offset is not None]
    assert sum(buffer.num_bytes for buffer in planned) > report.pool_bytes
    places = [(b, range(b.offset or 0, (b.offset or 0) + b.num_bytes)) for b in planned]
    for (one, here), (other, there) in itertools.combinations(places, 2):
        apart = one.last < other.first or other.last < one.first
        assert apart or here[-1] < there[0] or there[-1] < here[0]
        assert max(here[-1], there[-1]) < report.pool_bytes
    assert f"{max(report.program.live_bytes()):,} bytes at one time" in str(report)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.temperature = 0.375

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x * self.temperature).sum()  # temperature


def test_report_names_the_line_that_bakes_a_number_in() -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625, weight_decay=0.03125, foreach=False)
    with graphfsdp.capture(model, optimizer) as step:
        for _ in range(4):
            step(torch.ones(4))
        baked = step.report().baked_constants
    uses = [constant for constant in baked if constant.value == "0.375"]
    assert [constant.phase for constant in uses] == ["forward", "backward"]
    for constant in uses:
        assert (constant.op, constant.argument) == ("aten.mul.Tensor", "other")
        assert constant.module == ""
        assert constant.source is not None
        assert constant.source.line == line_of(Scaled.forward, "# temperature")
        assert f"other=0.375 of aten.mul.Tensor at {__file__}" in str(constant)
    steps = {constant.value: constant for constant in baked if constant.phase == "optimizer"}
    assert "0.03125" in steps
    assert "-0.0625" not in steps, "the learning rate is live"


@on_ranks("ranks2")
def test_report_of_a_sharded_step_counts_collectives() -> None:
    model = make_net("optim_grads_params")
    with graphfsdp.capture(model, adam(model, "fused_adam"), max_grad_norm=1.0) as step:
        for batch in batches(4):
            step(*my_part(batch))
        report = step.report()
    collectives = report.by_kind["collective"]
    assert collectives["graphfsdp.all_gather_.default"] > 1
    assert collectives["graphfsdp.reduce_scatter_.default"] > 1
    roles = {buffer.role.name for buffer in report.buffers()}
    assert {"PARAMETER", "GRADIENT"} <= roles
    assert any(node.site.module and "." in node.site.module for node in report.nodes())


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
        yield step.report()


def test_json_holds_everything_and_reads_back(
    report: graphfsdp.CaptureReport, tmp_path: Path
) -> None:
    text = report.to_json(tmp_path / "report.json", indent=1)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data == json.loads(text) == report.to_dict()
    assert data["num_nodes"] == len(data["nodes"]) == len(data["live_bytes"])
    modules = {node["module"] for node in data["nodes"]}
    assert {"body.</script><b>", 'body.quote"', "", None} >= modules
    assert len(modules) == 4
    for index, node in enumerate(data["nodes"]):
        assert node["index"] == index
        for number in (*node["reads"], *node["writes"]):
            buffer = data["buffers"][number]
            assert buffer["index"] == number
            assert buffer["first"] <= index <= buffer["last"]


def test_page_holds_the_report_and_loads_nothing(
    report: graphfsdp.CaptureReport, tmp_path: Path
) -> None:
    report.html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|@@", text)
    assert not re.search(r"<[^>]+\b(src|href|srcset|action)=", text)
    data, program = re.findall(r"<script\b[^>]*>(.*?)</script>", text, re.DOTALL)
    assert json.loads(data) == report.to_dict()
    named = set(re.findall(r'\$\("([a-z-]+)"\)', program))
    assert named
    assert named <= set(re.findall(r'\bid="([a-z-]+)"', text))


KIB = 1024


def facts_of(iterate: Callable[[], list[Tensor]]) -> Any:
    return record(iterate)[0].facts.program


def test_live_bytes_are_what_each_node_still_needs() -> None:
    x = torch.ones(256)

    def iterate() -> list[Tensor]:
        a = x.exp()  # node 0: a
        b = a.sin()  # node 1: a, b
        c = b.cos()  # node 2: b, c (a is over)
        return [c.sum()]  # node 3: c, the sum

    program = facts_of(iterate)
    assert [node.op for node in program.nodes] == [
        f"aten.{op}.default" for op in ("exp", "sin", "cos", "sum")
    ]
    assert program.live_bytes() == [KIB, 2 * KIB, 2 * KIB, KIB + 4]
    result = [buffer for buffer in program.buffers if buffer.role.name == "OUTPUT"]
    assert [(buffer.first, buffer.last) for buffer in result] == [(3, 4)]


def test_constant_tensors_are_shown_by_value() -> None:
    x = torch.ones(2)

    def iterate() -> list[Tensor]:
        return [x * torch.tensor([2.5, 3.5]) + torch.arange(9.0)[:2] + torch.tensor([0.0] * 9)[:2]]

    baked = [a.value for n in facts_of(iterate).nodes for a in n.arguments if a.baked]
    assert "[2.5, 3.5]" in baked
    assert "a constant float32[9]" in baked


def test_the_description_keeps_no_tensor_alive_and_stays_small() -> None:
    x = torch.ones(64, 64)

    def iterate() -> list[Tensor]:
        y = x
        for _ in range(400):
            y = torch.relu(y + 1)
        return [y.sum()]

    program = facts_of(iterate)
    assert len(program.nodes) == 801
    seen: set[int] = set()
    todo: list[Any] = [program]
    num_bytes = 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | str):
            continue
        seen.add(id(item))
        num_bytes += sys.getsizeof(item)
        assert not isinstance(item, Tensor | torch.UntypedStorage | nn.Module)
        if type(item).__module__.startswith(("builtins", "array", "graphfsdp")):
            todo.extend(gc.get_referents(item))
    assert num_bytes < 801 * 500  # a node and its buffer; texts and arguments are shared
