import dataclasses
import json
import pathlib
import time

import pytest
import torch

from bench_results import result
from benchmarks import environment, readme_table, workloads
from benchmarks.timing import interleave, speedups, window_seconds
from graphfsdp.bench.record_files import write_result
from graphfsdp.bench.result_directory import write_directory
from graphfsdp.bench.spread import Spread
from graphfsdp.training.gpt import GPT


def test_contenders_take_turns_and_the_order_turns_round() -> None:
    calls: list[str] = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = interleave(contenders, num_rounds=3, num_calls=2, device=torch.device("cpu"))
    assert "".join(calls) == "aabbcc" + "ccbbaa" + "aabbcc"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_speedup_is_taken_within_a_round() -> None:
    """A machine that is twice as slow in the second round does not show."""
    seconds = {"none": [2.0, 4.0, 2.0], "full": [1.0, 2.0, 1.6]}
    assert speedups(seconds, "none") == {"full": Spread(median=2.0, minimum=1.25, maximum=2.0)}


def test_a_window_gives_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert window_seconds(lambda: None, num_calls=6, device=torch.device("cpu")) == 0.5


def test_every_scope_trains_on_the_same_batches(device: torch.device) -> None:
    losses = {}
    for scope in workloads.SCOPES:
        with workloads.Run(workloads.TINY_LLAMA, scope, device, dropout=0.1) as run:
            losses[scope] = torch.stack([run() for _ in range(workloads.WARMUP_STEPS + 5)])
    assert torch.equal(losses["none"], losses["forward_backward"])
    assert torch.equal(losses["none"], losses["full_iteration"])
    assert losses["none"].unique().numel() == len(losses["none"])


def test_the_compute_bound_models_have_the_sizes_that_their_names_say() -> None:
    for workload in (workloads.GPT_3M, workloads.GPT_11M, workloads.GPT2_124M):
        with torch.device("meta"):
            model = GPT(workload.model)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        named = float(workload.name.rpartition("-")[2].removesuffix("m"))
        assert millions == pytest.approx(named, rel=0.02)


def test_a_result_of_the_command_is_kept_and_shown(tmp_path: pathlib.Path) -> None:
    folder, results = tmp_path / "run", tmp_path / "benchmarks" / "results"
    folder.mkdir()
    made = result()
    facts = dataclasses.replace(made.environment, gpu="NVIDIA Z9", date="2026-02-03T04:05:06")
    for environment_, name in ((made.environment, "bench_cpu"), (facts, "bench_gpu_nvidia-z9")):
        write_directory(dataclasses.replace(made, environment=environment_), folder)
        kept = readme_table.keep(folder, results)
        assert kept.name.startswith(name)
        assert kept.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for section in (readme_table.bench_cpu(results), readme_table.bench_gpu(results)):
        assert section is not None
        assert "| gpt-tiny fp32, 4 x 32 tokens | 5.00 | 1.50 (2.50x) |" in section
        assert "| gpt-tiny fp32, 4 x 32 tokens | 256.0 MiB | 256.0 MiB |" in section
        assert "Did not run: `compile`: no compiler." in section
        assert "Left out: moe: no time." in section
        assert "(benchmarks/results/bench_" in section
    assert "on NVIDIA Z9" in str(readme_table.bench_gpu(results))


def test_without_a_result_the_readme_says_so(tmp_path: pathlib.Path) -> None:
    assert readme_table.bench_cpu(tmp_path) == "Not measured yet: `make bench`."
    assert readme_table.bench_gpu(tmp_path) == "No GPU has been measured yet."


def test_the_newest_result_of_a_gpu_is_shown(tmp_path: pathlib.Path) -> None:
    for date, gpu in (("2026-03-01", "Newest"), ("2026-02-01", "Older")):
        facts = dataclasses.replace(result().environment, gpu=gpu, date=f"{date}T00:00:00")
        path = tmp_path / f"bench_gpu_{gpu}.json"
        write_result(dataclasses.replace(result(), environment=facts), path)
    assert "on Newest" in str(readme_table.bench_gpu(tmp_path))


def test_numbers_go_between_the_markers_and_nowhere_else(tmp_path: pathlib.Path) -> None:
    text = "a\n<!-- gpu_check: begin -->\nold\n<!-- gpu_check: end -->\nb old\n"
    expected = "a\n<!-- gpu_check: begin -->\nNo GPU has been measured yet.\n"
    expected += "<!-- gpu_check: end -->\nb old\n"
    assert readme_table.updated(text, tmp_path) == expected
    assert readme_table.updated(expected, tmp_path) == expected


def test_the_newest_check_of_a_real_gpu_is_shown(tmp_path: pathlib.Path) -> None:
    for gpu, date, seen in (
        ("NVIDIA Z", "2026-01-02", "new"),
        ("NVIDIA A", "2025-01-02", "old"),
        (None, "2027-01-01", "rehearsal"),
    ):
        facts = {"gpu": gpu, "date": date, "driver": "1", "torch": "2", "triton": "3"}
        row = {"what": "x", "result": seen, "ok": False}
        document = {
            "environment": {**facts, "python": "3.12"},
            "parts": [{"name": "tests", "rows": [row]}],
        }
        name = f"gpu_check_{environment.slug(str(gpu))}_{date}.json"
        (tmp_path / name).write_text(json.dumps(document))
    table = readme_table.gpu_check(tmp_path)
    assert table is not None
    assert "| tests | x | new | **no** |" in table
    assert "one NVIDIA Z" in table


def test_the_readme_shows_the_numbers_of_the_result_files() -> None:
    text = readme_table.README.read_text(encoding="utf-8")
    for section in readme_table.SECTIONS:
        assert f"<!-- {section}: begin -->" in text
        assert f"<!-- {section}: end -->" in text
    assert "<!-- gpu_check: begin -->" in text
    assert readme_table.updated(text) == text, "run python -m benchmarks.readme_table"
