import gc
import json
import pathlib
from typing import Any

import pytest
import torch

from bench_results import ENVIRONMENT, result
from benchmarks import capture_nodes, optimizer_step, readme_table
from graphfsdp.bench.results import RESULT


def test_a_result_of_the_command_is_kept_and_shown(tmp_path: pathlib.Path) -> None:
    """Of a GPU the newest one."""
    folder, results = tmp_path / "run", tmp_path / "benchmarks" / "results"
    folder.mkdir()
    assert readme_table.bench_gpu(results) == "No GPU has been measured yet."
    for facts, name in (
        ({}, "bench_cpu"),
        ({"gpu": "NVIDIA Z9", "date": "2026-02-03"}, "bench_gpu_nvidia-z9"),
        ({"gpu": "NVIDIA Z8", "date": "2026-01-03"}, "bench_gpu_nvidia-z8"),
    ):
        result(**facts).write(folder / RESULT)
        assert readme_table.keep(folder, results).name.startswith(name)
    for name in ("bench_cpu", "bench_gpu"):
        section = readme_table.SECTIONS[name](results)
        assert "| gpt-tiny fp32, 4 x 32 tokens | 5.00 | 1.50 (2.50x) |" in section
        assert "Did not run: `compile`: no compiler; `moe`: no time." in section
    assert "on NVIDIA Z9" in section


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
        facts = {**ENVIRONMENT, "gpu": gpu, "date": date}
        row = {"what": "x", "result": seen, "ok": False}
        document = {
            "environment": facts,
            "parts": [{"name": "tests", "rows": [row]}],
        }
        name = f"gpu_check_{gpu}_{date}.json"
        (tmp_path / name).write_text(json.dumps(document))
    table = readme_table.gpu_check(tmp_path)
    assert "| tests | x | new | no |" in table
    assert "on NVIDIA Z" in table


def test_the_document_of_fused_adam_shows_the_bytes_of_a_step() -> None:
    page = (readme_table.ROOT / "docs" / "fused_adam.md").read_text(encoding="utf-8")
    fp32, bf16 = torch.float32, torch.bfloat16
    main = {"master_weights": True}
    narrow = {"exp_avg_dtype": bf16, "exp_avg_sq_dtype": bf16}
    cases: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype]] = {
        "fp32": ({}, fp32, fp32),
        "fp32, bf16 moments": (narrow, fp32, fp32),
        "bf16, fp32 main weight": (main, bf16, bf16),
        "bf16, fp32 main weight and gradient": (main, bf16, fp32),
        "bf16, fp32 main weight, bf16 moments": (main | narrow, bf16, bf16),
        "all bf16": (narrow, bf16, bf16),
    }
    for name, case in cases.items():
        assert f"| {name} | {optimizer_step.bytes_per_param(*case):.4g} | " in page


def test_steps_of_optimizers_are_measured_beside_a_copy() -> None:
    rows = optimizer_step.measure("gpt-tiny", torch.device("cpu"))
    whose = [row["what"].split(",")[0] for row in rows]
    assert whose == ["torch AdamW(fused=True)", "FusedAdam", "FusedAdam"]
    assert all(row["ok"] and "times as fast as torch's" in row["result"] for row in rows)


def test_the_documents_show_the_numbers_of_the_result_files() -> None:
    texts = [document.read_text(encoding="utf-8") for document in readme_table.DOCUMENTS]
    for section in readme_table.SECTIONS:
        assert any(f"<!-- {section}: begin -->" in text for text in texts), section
        assert any(f"<!-- {section}: end -->" in text for text in texts), section
    for text in texts:
        assert readme_table.updated(text) == text, "run python -m benchmarks.readme_table"


@pytest.mark.parametrize(("slow_us", "code"), [(19.0, 0), (21.0, 1)])
def test_captures_are_timed_by_their_nodes_and_written(
    slow_us: float, code: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {10: 100.0, 1_000: 10.0, 5_000: 15.0, 20_000: 15.0, 60_000: slow_us}
    path = tmp_path / "nodes.json"
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(capture_nodes, "node_us", lambda size, _: found[size])
    assert capture_nodes.main(("--device", "cpu", "--out", str(path))) == code
    small, *_, ratio = json.loads(path.read_text())["rows"]
    assert (small["what"], small["result"]) == ("a capture of 1,000 nodes", "10.0 us for each")
    assert ratio["result"] == f"{slow_us / 10:.2f} times as long as of the smallest"
    assert ratio["ok"] == (code == 0)
    monkeypatch.undo()
    assert capture_nodes.node_us(90, torch.device("cpu")) > 0
