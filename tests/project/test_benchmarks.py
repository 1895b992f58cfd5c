import json
import pathlib
from typing import Any

import torch

from bench_results import ENVIRONMENT, result
from benchmarks import readme_table
from graphfsdp.bench.results import RESULT
from graphfsdp.optim import FusedAdam


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
        assert "Did not run: `compile`: no compiler." in section
        assert "Left out: moe: no time." in section
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


def bytes_per_param(
    settings: dict[str, Any], param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> float:
    """Return the bytes that one step reads and writes for each element of a parameter.

    State tensors are read and written, gradients read. A model weight is read and written, or only
    written where there is a float32 main weight.
    """
    param = torch.nn.Parameter(torch.zeros((2, 256), dtype=param_dtype))
    optimizer = FusedAdam([param], use_decoupled_grad=True, **settings)
    param.decoupled_grad = torch.ones_like(param, dtype=grad_dtype)  # type: ignore[attr-defined]
    optimizer.step()
    state = optimizer.state[param]
    written = param.nbytes + sum(value.nbytes for key, value in state.items() if key != "step")
    read = written + param.numel() * grad_dtype.itemsize
    if state.get("master_param", param).dtype != param_dtype:
        read -= param.nbytes
    moved: float = (read + written) / param.numel()
    return moved


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
        assert f"| {name} | {bytes_per_param(*case):.4g} | " in page


def test_the_documents_show_the_numbers_of_the_result_files() -> None:
    texts = [document.read_text(encoding="utf-8") for document in readme_table.DOCUMENTS]
    for section in readme_table.SECTIONS:
        assert any(f"<!-- {section}: begin -->" in text for text in texts), section
        assert any(f"<!-- {section}: end -->" in text for text in texts), section
    for text in texts:
        assert readme_table.updated(text) == text, "run python -m benchmarks.readme_table"
