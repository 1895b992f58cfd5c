"""Writes megatron_schedules.json: the numbers of Megatron's own scheduler.

    python tests/references/make_megatron_schedules.py PATH/optimizer_param_scheduler.py

The file is megatron/core/optimizer_param_scheduler.py of github.com/NVIDIA/Megatron-LM, at the
commit below. It runs alone; of the rest of Megatron it needs one function that writes a log.
"""

import json
import pathlib
import runpy
import sys
import types
from typing import Any

COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
ITERATIONS = (0, 1, 4, 5, 9, 10, 11, 25, 39, 40, 41, 49, 50, 51, 59, 60, 61, 65)
COMMON: dict[str, Any] = {
    "init_lr": 0.0,
    "max_lr": 1.0,
    "min_lr": 0.1,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 60,
    "wsd_decay_steps": None,
    "lr_wsd_decay_style": None,
}
CASES: list[dict[str, Any]] = [
    *({"lr_decay_style": s} for s in ("constant", "linear", "cosine", "inverse-square-root")),
    {"lr_decay_style": "linear", "lr_warmup_steps": 0},
    {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 0, "min_lr": 0.3},
]


def load(path: str) -> Any:
    """Import the file without the rest of Megatron."""
    utils: Any = types.ModuleType("megatron.core.utils")
    utils.log_single_rank = lambda *args, **kwargs: None
    for name in ("megatron", "megatron.core"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["megatron.core.utils"] = utils
    return runpy.run_path(path)["OptimizerParamScheduler"]


def numbers_of(kind: Any, arguments: dict[str, Any]) -> list[list[float]]:
    """Return lr of two groups in each iteration."""
    optimizer = types.SimpleNamespace(
        param_groups=[{"lr": 0.0}, {"lr": 0.0, "max_lr": 0.5, "min_lr": 0.2}]
    )
    decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 60, "wd_incr_style": "constant"}
    scheduler = kind(optimizer, **decay, **arguments)
    rows = []
    for iteration in range(max(ITERATIONS) + 1):
        if iteration in ITERATIONS:
            rows.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step(1)
    return rows


def main() -> None:
    kind = load(sys.argv[1])
    cases = [{**COMMON, **case} for case in CASES]
    facts = {
        "source": f"NVIDIA/Megatron-LM, megatron/core/optimizer_param_scheduler.py, {COMMIT}",
        "how": "tests/references/make_megatron_schedules.py",
        "iterations": ITERATIONS,
        "cases": [{"arguments": c, "numbers": numbers_of(kind, c)} for c in cases],
    }
    target = pathlib.Path(__file__).with_name("megatron_schedules.json")
    target.write_text(json.dumps(facts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
