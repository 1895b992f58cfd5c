"""``graphfsdp bench --profile``: what a timeline says, and who named it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile

import graphfsdp
from graphfsdp.base.nvtx import RANGE_PREFIX, nvtx_range
from graphfsdp.bench import measure
from graphfsdp.bench.contenders import Setting
from graphfsdp.bench.measure import Job, case_folder, measure_case
from graphfsdp.bench.options import BenchOptions
from graphfsdp.bench.profile import (
    STEP,
    ProfileRecord,
    describe_profile,
    profile_contender,
    summarise,
)
from graphfsdp.bench.records import from_data
from graphfsdp.bench.workloads import Case, find_workload
from graphfsdp.optim import FusedAdam

CPU = torch.device("cpu")


def job_on(device: torch.device, contender: str, *, profiles: str | None = None) -> Job:
    setting = Setting(Case(find_workload("gpt-tiny"), "fp32", 1), device)
    options = BenchOptions(seconds=0.1, random_tokens=True)
    return Job(setting, (contender,), options, profiles)


def event(name: str, start: float, end: float, stream: int | None = None) -> FunctionEvent:
    """``stream``: a kernel of a GPU."""
    on_gpu = stream is not None
    return FunctionEvent(
        *(0, name, stream or 1, start, end),
        device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU,
        use_device="cuda" if on_gpu else None,
        stack=[],
        is_user_annotation=name == STEP,
    )


def summary(*events: FunctionEvent) -> ProfileRecord:
    on_gpu = any(event.device_type == DeviceType.CUDA for event in events)
    made = EventList(events, use_device="cuda" if on_gpu else None)
    made._build_tree()
    return summarise(made, case="x", contender="y", trace="t")


def test_operators_gaps_and_ranges_of_a_made_up_cpu_step() -> None:
    found = summary(
        event(STEP, 0, 1000),
        event(RANGE_PREFIX + "eager", 100, 900),
        event(RANGE_PREFIX + "forward", 150, 500),
        event("aten::linear", 200, 400),
        event("aten::addmm", 250, 390),
        event(RANGE_PREFIX + "unshard ", 1200, 1202),
        event("autograd::engine::evaluate_function: AddmmBackward0", 500, 800),
        event("AddmmBackward0", 510, 790),
        event("aten::mm", 600, 700),
        event("aten::mm", 700, 720),
        event(STEP, 1000, 2000),
        event("aten::linear", 1000, 1100),
    )
    assert (found.what, found.num_steps, found.step_ms) == ("operators", 2, 1.0)
    # linear 200, mm 120, linear 100: what autograd does around them is no operator.
    assert found.busy_ms == pytest.approx(0.42 / 2)
    assert found.gap_ms == pytest.approx(1.0 - 0.21)
    assert found.num_kernels == 4 / 2
    sums = {item.name: (item.ms, item.calls) for item in found.largest}
    assert sums["aten::linear"] == pytest.approx(((300 - 140) / 2e3, 1.0))  # without its addmm
    assert sums["aten::addmm"] == pytest.approx((140 / 2e3, 0.5))
    assert sums["aten::mm"] == pytest.approx((120 / 2e3, 1.0))
    gaps = [(gap.ms, gap.after, gap.before, gap.within) for gap in found.gaps]
    assert gaps == [
        (0.9, "aten::linear", "", ""),
        (0.28, "aten::mm", "aten::linear", "eager"),
        (0.2, "", "aten::linear", "eager"),
        (0.2, "aten::linear", "aten::mm", "eager"),
    ]
    assert [(r.name, r.ms, r.calls) for r in found.ranges] == [
        ("eager", 0.4, 0.5), ("forward", 0.175, 0.5), ("unshard (root)", 0.001, 0.5)
    ]  # fmt: skip


def test_a_gpu_is_busy_where_any_stream_is_and_kernels_do_not_lie_in_each_other() -> None:
    found = summary(
        event(STEP, 0, 10),
        event(STEP, 0, 10, stream=7),
        event("aten::mm", 0, 9),
        event("gemm", 20, 60, stream=7),
        event("reduce", 30, 50, stream=8),
        event("Memcpy DtoD", 70, 90, stream=7),
    )
    assert (found.what, found.num_steps, found.num_kernels) == ("kernels", 1, 3)
    assert found.step_ms == pytest.approx(0.09)  # until the GPU is done
    assert found.busy_ms == pytest.approx(0.06)
    assert {k.name: k.ms for k in found.largest} == pytest.approx(
        {"gemm": 0.04, "Memcpy DtoD": 0.02, "reduce": 0.02}
    )
    assert [(g.ms, g.after, g.before) for g in found.gaps] == [
        (0.02, "", "gemm"), (0.01, "gemm", "Memcpy DtoD")
    ]  # fmt: skip


def test_no_more_than_ten_of_each_are_told_and_names_of_templates_are_cut() -> None:
    many = [event(f"aten::op{i}" + "x" * 500, 20 * i, 20 * i + 10 - i / 10) for i in range(30)]
    found = summary(event(STEP, 0, 600), *many)
    assert len(found.largest) == len(found.gaps) == 10
    assert found.largest[0].name.startswith("aten::op0x")
    text = describe_profile(found)
    assert max(map(len, text.splitlines())) < 250
    assert "30 operators, 30 gaps" in text


def small_step(scope: str, device: torch.device) -> tuple[graphfsdp.CapturedStep, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)).to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    step = graphfsdp.capture(model, optimizer, loss_fn=loss_fn, scope=scope)
    return step, torch.randn(4, 8, device=device)


@pytest.mark.parametrize("scope", ["none", "forward_backward", "full_iteration"])
def test_a_real_profile_names_phases_and_what_replays_run(scope: str, tmp_path: Path) -> None:
    step, batch = small_step(scope, CPU)
    with step:
        for _ in range(5):
            step(batch)
        report = step.report()
        record = profile_contender(
            [lambda: step(batch)] * 3,
            case="small",
            contender=scope,
            device=CPU,
            folder=tmp_path,
            report=report if report.num_captures else None,
        )
    assert (record.num_steps, record.what) == (2, "operators")
    assert 0 < record.busy_ms < record.step_ms
    names = {item.name for item in record.ranges}
    expected = {
        "none": {"copy-in", "eager", "forward", "backward", "optimizer"},
        "forward_backward": {"copy-in", "replay", "optimizer"},
        "full_iteration": {"copy-in", "replay"},
    }
    assert expected[scope] <= names
    assert all(item.calls == 1 for item in record.ranges if item.name in expected[scope])
    trace = json.loads((tmp_path / f"{scope}.trace.json").read_text())
    assert RANGE_PREFIX + "copy-in" in {data["name"] for data in trace["traceEvents"]}
    assert record.graph == (None if scope == "none" else f"{scope}.graph.json")
    if record.graph is not None:
        graph = json.loads((tmp_path / record.graph).read_text())["traceEvents"]
        phases = [data["name"] for data in graph if data.get("cat") == "phase"]
        assert phases[:2] == ["forward", "backward"]
        assert ("optimizer" in phases) == (scope == "full_iteration")
    read = from_data(ProfileRecord, json.loads((tmp_path / f"{scope}.json").read_text()))
    assert read == record
    assert "largest operators" in (tmp_path / f"{scope}.txt").read_text()


def test_ranges_are_there_under_a_profiler_alone_and_no_recording_holds_them() -> None:
    step, batch = small_step("full_iteration", CPU)
    plain, _ = small_step("full_iteration", CPU)
    with step, plain:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            for _ in range(5):
                step(batch)
        for _ in range(5):
            plain(batch)
        assert step.report().op_counts == plain.report().op_counts
    seen = {item.name for item in profiler.events() or () if item.name.startswith(RANGE_PREFIX)}
    phases = {"warm-up", "capture", "forward", "backward", "optimizer", "replay", "copy-in"}
    assert seen >= {RANGE_PREFIX + name for name in phases}
    with (
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler,
        nvtx_range("mine"),
    ):
        pass
    assert [item.name for item in profiler.events() or ()] == [RANGE_PREFIX + "mine"]


def test_the_benchmark_profiles_every_contender_and_its_numbers_stay(
    device: torch.device, tmp_path: Path
) -> None:
    job = job_on(device, "full_iteration", profiles=str(tmp_path / "profile"))
    result = measure_case(job, lambda phase, name: None)
    folder = case_folder(str(tmp_path / "profile"), result.workload.key)
    kinds = ("txt", "json", "trace.json")
    kept = {f"{name}.{kind}" for name in ("eager", "full_iteration") for kind in kinds}
    assert {path.name for path in folder.iterdir()} == {*kept, "full_iteration.graph.json"}
    assert [item.parity.bit_exact for item in result.contenders] == [True, True]


def test_a_contender_that_fails_under_the_profiler_says_so_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measure,
        "profile_contender",
        lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no memory")),
    )
    job = job_on(CPU, "eager", profiles=str(tmp_path))
    found = measure_case(job, lambda phase, name: None)
    text = (case_folder(str(tmp_path), found.workload.key) / "eager.txt").read_text()
    assert "eager has no profile: RuntimeError: no memory" in text
