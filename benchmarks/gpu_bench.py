"""``graphfsdp bench`` as a part of the GPU check; its result and picture are kept."""

import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import torch

from benchmarks import environment

MAX_CHARACTERS = 6000
# Of a call: Python starts, pictures are drawn.
OVERHEAD_S = 20.0


def bench_part(device: torch.device, limit_s: float, results: pathlib.Path) -> dict[str, Any]:
    """Run the benchmark's suite for a GPU within a time; a CPU rehearses it on one small case.

    Args:
        device: What to measure.
        limit_s: Seconds; cases that do not fit are named in the rows.
        results: Where result and picture are kept.
    """
    suite = ["--suite", "gpu"]
    if device.type == "cpu":
        suite = ["--suite", "quick", "--seconds", "0.5", "--no-memory"]
    budget = max(limit_s - OVERHEAD_S, 1.0) / 60
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "graphfsdp", "bench", "--device", device.type, *suite]
        command += ["--budget", f"{budget:.3f}", "--out", folder]
        try:
            done = subprocess.run(
                command,
                cwd=environment.ROOT,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"rows": [], "error": f"stopped after {limit_s:.0f} s"}
        if done.returncode:
            tail = (done.stdout + done.stderr)[-MAX_CHARACTERS:]
            return {"rows": [], "error": f"the process ended with {done.returncode}\n{tail}"}
        return {"rows": rows_of(pathlib.Path(folder), results), "error": None}


def rows_of(folder: pathlib.Path, results: pathlib.Path) -> list[dict[str, Any]]:
    """Keep the result and return a row for each contender of each case.

    A row is good if the contender ran, or if it is not ours; and if ours trained eager's losses.
    """
    # Here, since a package that cannot be imported is something to report.
    from benchmarks.readme_table import keep
    from graphfsdp.bench.record_files import read_result
    from graphfsdp.bench.records import NOT_ASKED, REFERENCE
    from graphfsdp.bench.words import memory_text, parity_text, ratio_text, workload_text

    keep(folder, results)
    result = read_result(folder)
    rows: list[dict[str, Any]] = []
    for case in result.cases:
        name = workload_text(case.workload)
        for own in case.contenders:
            text = f"{own.timing.steps.median:.3f} ms/step, {case.items_per_s(own.name):,.0f} "
            text += f"{case.workload.unit}/s, peak memory {memory_text(own)}"
            if own.name != REFERENCE:
                text += f"; {ratio_text(case.speedup(own.name))} times as fast as eager; losses "
                text += parity_text(own.parity)
            good = own.parity.max_difference is not None
            rows.append({"what": f"{name}: {own.name}", "result": text, "ok": good})
        rows += [
            {"what": f"{name}: {item.name}", "result": item.reason, "ok": not _is_ours(item.name)}
            for item in case.not_run
            if item.reason != NOT_ASKED
        ]
    rows += [
        {"what": key, "result": f"left out: {why}", "ok": True}
        for key, why in result.left_out.items()
    ]
    return rows


def _is_ours(name: str) -> bool:
    return name in ("forward_backward", "full_iteration", "compile_full_iteration")
