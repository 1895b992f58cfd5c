"""The facts that a captured step tells of itself, also of a sharded one."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import line_of
from ranks import RankPool
from sharding_helpers import adam, batches, full_parameters, make_net, my_part
from zoo import ZOO
from zoo_models import gpt

CPU = torch.device("cpu")


def start(device: torch.device, **options: object) -> tuple[graphfsdp.CapturedStep, nn.Module]:
    model = gpt().to(device)
    return graphfsdp.capture(model, FusedAdam(model.parameters()), **options), model  # type: ignore[arg-type]


def call(step: graphfsdp.CapturedStep, device: torch.device, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        step(*ZOO["gpt"].batch(generator).to(device).args)


def test_report_of_a_step_that_has_not_run(device: torch.device) -> None:
    step, model = start(device)
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


def test_report_of_a_captured_step(device: torch.device) -> None:
    step, _ = start(device, max_grad_norm=1.0)
    call(step, device, 9)
    report = step.report()
    assert report.phase == "replay"
    assert report.num_calls == {"warmup": 3, "capture": 1, "replay": 5}
    assert report.num_captures == 1
    assert report.capture_ms is not None
    assert report.capture_ms > 0
    assert report.warmup_ms > 0
    assert (report.replay_ms is None) == (report.backend == "cuda")
    assert report.num_ops is not None
    assert report.num_ops > 50
    assert report.static_input_bytes == 2 * 12 * 6 * 8
    assert report.inputs == {
        f"args[{index}]": f"a torch.int64 tensor of shape (12, 6) on {next_device(step)}"
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


def next_device(step: graphfsdp.CapturedStep) -> torch.device:
    return step._runner._backend.device


def test_a_graph_has_the_same_nodes_whoever_records_it(device: torch.device) -> None:
    counts = []
    for _ in range(2):
        step, _ = start(device)
        call(step, device, 4)
        counts.append((step.report().num_nodes, step.report().num_ops))
    assert counts[0] == counts[1]


def test_a_report_is_frozen_and_of_its_moment(device: torch.device) -> None:
    step, _ = start(device)
    early = step.report()
    call(step, device, 2)
    assert early.num_calls == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        early.phase = "replay"  # type: ignore[misc]
    step.close()
    assert step.report().num_calls == {"warmup": 2}
    assert step.report().phase == "closed"


def captured(**options: object) -> graphfsdp.CapturedStep:
    step, _ = start(CPU, max_grad_norm=1.0, **options)
    call(step, CPU, 5)
    return step


def test_report_names_the_memory_that_nodes_touch() -> None:
    step = captured()
    buffers = step.report().buffers()
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
    assert set(report.by_kind) == {"compute", "copy", "fill", "random", "view"}
    assert sum(report.by_kind["random"].values()) == 5  # one for each dropout
    text = str(report)
    assert "  by phase:          " in text
    assert " backward, " in text


def test_report_tells_how_the_memory_of_the_iteration_is_reused() -> None:
    report = captured().report()
    pool = report.pool
    assert pool is not None
    assert report.program is not None
    live = report.program.live_bytes()
    assert pool.peak_bytes == max(live) == live[pool.peak_node]
    own = [b for b in report.buffers() if b.role.name in ("INTERMEDIATE", "OUTPUT")]
    assert pool.num_buffers == len(own)
    assert pool.made_bytes == sum(buffer.num_bytes for buffer in own)
    planned = [buffer for buffer in own if buffer.offset is not None]
    assert pool.planned_bytes == sum(buffer.num_bytes for buffer in planned)
    assert pool.pool_bytes == report.pool_bytes
    assert 1 < pool.reuse == pool.planned_bytes / report.pool_bytes
    places = [(b, range(b.offset or 0, (b.offset or 0) + b.num_bytes)) for b in planned]
    for (one, here), (other, there) in itertools.combinations(places, 2):
        apart = one.last < other.first or other.last < one.first
        assert apart or here[-1] < there[0] or there[-1] < here[0]
        assert max(here[-1], there[-1]) < report.pool_bytes
    for buffer in own:
        assert live[buffer.first] >= buffer.num_bytes
    assert f"{pool.made_bytes:,} bytes made, {pool.peak_bytes:,} at one time" in str(report)


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


def test_a_measured_report_leaves_everything_as_it_was() -> None:
    outputs = []
    for measure in (False, True):
        torch.manual_seed(3)
        step, model = start(CPU, max_grad_norm=1.0)
        generator = torch.Generator().manual_seed(0)
        losses = []
        for index in range(10):
            losses.append(step(*ZOO["gpt"].batch(generator).args))
            if measure and index in (3, 6):
                report = step.report(measure=True)
                assert report.num_calls == step.report().num_calls
                assert len(report.node_us) == report.num_nodes
                for node in report.nodes():
                    assert (report.node_us[node.index] > 0) is node.called
        outputs.append([*losses, *(param.detach().clone() for param in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_only_a_captured_graph_can_be_measured() -> None:
    step, _ = start(CPU)
    with pytest.raises(graphfsdp.PhaseError, match=r"no graph to measure in phase warmup.*4 calls"):
        step.report(measure=True)


def test_a_report_outlives_its_step() -> None:
    step = captured()
    report = step.report()
    text = report.to_json()
    step.close()
    del step
    assert report.to_json() == text


NUM_CALLS = 7


def train(strategy: str, *, measure: bool) -> tuple[list[torch.Tensor], graphfsdp.CaptureReport]:
    model = make_net(strategy)
    with graphfsdp.capture(model, adam(model, "fused_adam"), max_grad_norm=1.0) as step:
        losses = []
        for index, batch in enumerate(batches(NUM_CALLS)):
            losses.append(step(*my_part(batch)))
            report = step.report(measure=measure and index >= 4)
    return [*losses, *full_parameters(model).values()], report


def measured_and_not(strategy: str) -> dict[str, Any]:
    plain, _ = train(strategy, measure=False)
    measured, report = train(strategy, measure=True)
    roles = {buffer.name: buffer.role for buffer in report.buffers()}
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True)),
        "collectives": dict(report.by_kind["collective"]),
        "collective_us": sum(
            report.node_us[node.index] for node in report.nodes() if node.kind.value == "collective"
        ),
        "parameters": [name for name, role in roles.items() if role.name == "PARAMETER"],
        "gradients": [name for name, role in roles.items() if role.name == "GRADIENT"],
        "modules": {node.site.module for node in report.nodes()},
    }


def test_report_of_a_sharded_step_counts_collectives_and_measures_them(ranks2: RankPool) -> None:
    for result in ranks2.run(measured_and_not, "optim_grads_params"):
        assert result["equal"]
        collectives = result["collectives"]
        assert collectives["graphfsdp.all_gather_.default"] > 1
        assert collectives["graphfsdp.reduce_scatter_.default"] > 1
        assert result["collective_us"] > 0
        assert result["parameters"]
        assert result["gradients"]
        assert any(name and "." in name for name in result["modules"])
