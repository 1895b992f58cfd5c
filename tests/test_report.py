"""The facts that a captured step tells of itself."""

import dataclasses

import pytest
import torch
from torch import nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import quick_garbage_collection
from zoo import ZOO
from zoo_models import GPT


def start(device: torch.device, **options: object) -> tuple[graphfsdp.CapturedStep, nn.Module]:
    quick_garbage_collection()
    model = GPT().to(device)
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
    return step._backend.device


def test_report_counts_tensors_that_the_model_keeps() -> None:
    case = ZOO["moving_average"]
    model = case.make()
    step = graphfsdp.capture(model, FusedAdam(model.parameters()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        step(*case.batch(generator).args)
    assert step.report().num_escapes == 1
    assert "kept by the model: 1 tensors" in str(step.report())


def test_a_graph_has_the_same_nodes_whoever_records_it(device: torch.device) -> None:
    counts = []
    for _ in range(2):
        step, _ = start(device)
        call(step, device, 4)
        counts.append((step.report().num_nodes, step.report().num_ops))
    assert counts[0] == counts[1]


def test_forward_and_backward_alone_have_no_node_of_the_optimizer() -> None:
    step, _ = start(torch.device("cpu"), scope="forward_backward", max_grad_norm=1.0)
    call(step, torch.device("cpu"), 5)
    report = step.report()
    assert report.scope == "forward_backward"
    assert not [name for name in report.op_counts if "adam" in name or "norm.Scalar" in name]


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
