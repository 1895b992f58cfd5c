"""``graphfsdp bench --profile``: what a timeline says, and who named it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import graphfsdp
from graphfsdp.base.nvtx import RANGE_PREFIX, nvtx_range
from graphfsdp.bench import measure
from graphfsdp.bench.contenders import Setting
from graphfsdp.bench.measure import Job, case_folder, measure_case
from graphfsdp.bench.options import BenchOptions
from graphfsdp.bench.profile import profile_contender
from graphfsdp.bench.workloads import Case, find_workload
from graphfsdp.optim import FusedAdam

CPU = torch.device("cpu")


def job_on(device: torch.device, contender: str, *, profiles: str | None = None) -> Job:
    setting = Setting(Case(find_workload("gpt-tiny"), "fp32", 1), device)
    options = BenchOptions(seconds=0.1, random_tokens=True)
    return Job(setting, (contender,), options, profiles)


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
        profile_contender(
            [lambda: step(batch)] * 3,
            contender=scope,
            device=CPU,
            folder=tmp_path,
            report=report if report.num_captures else None,
        )
    expected = {
        "none": {"copy-in", "eager", "forward", "backward", "optimizer"},
        "forward_backward": {"copy-in", "replay", "optimizer"},
        "full_iteration": {"copy-in", "replay"},
    }
    text = (tmp_path / f"{scope}.txt").read_text()
    assert text.startswith(f"{scope}: 2 steps of ")
    rows = (line.strip() for line in text.splitlines() if line.strip())
    calls = {row.split("  ")[0]: row.split()[-1] for row in rows}
    assert all(calls[RANGE_PREFIX + name] == "2" for name in expected[scope])
    trace = json.loads((tmp_path / f"{scope}.trace.json").read_text())
    assert RANGE_PREFIX + "copy-in" in {data["name"] for data in trace["traceEvents"]}
    kept = tmp_path / f"{scope}.graph.json"
    assert kept.exists() == (scope != "none")
    if scope != "none":
        graph = json.loads(kept.read_text())["traceEvents"]
        phases = [data["name"] for data in graph if data.get("cat") == "phase"]
        assert phases[:2] == ["forward", "backward"]
        assert ("optimizer" in phases) == (scope == "full_iteration")


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
    kinds = ("txt", "trace.json")
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
