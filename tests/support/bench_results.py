"""A result of the benchmark that nobody measured, for tests of what is made of it."""

from typing import Any

from graphfsdp.bench.results import Result, Row

CASE = "gpt-tiny fp32 x4"
FACTS: Row = {
    "case": CASE,
    "workload": "gpt-tiny",
    "dtype": "fp32",
    "batch_size": 4,
    "items_per_sample": 32,
    "unit": "tokens",
}
ENVIRONMENT: Row = {
    "date": "2026-01-02T03:04:05",
    "python": "3.11",
    "torch": "2.13.0",
    "cpu": "some CPU",
    "num_cpus": 2,
    "num_threads": 1,
    "num_ranks": 1,
    "load_average": None,
    "gpu": None,
    "driver": None,
}


def contender(name: str, *windows: tuple[float, ...]) -> Row:
    return {
        **FACTS,
        "contender": name,
        "init_ms": 21.5,
        "step_ms": [list(window) for window in windows],
        "cpu_ms": [2.0] * len(windows),
        "num_steps": 10,
        "max_difference": 0.0,
        "bit_exact": True,
        "early_difference": 0.0,
    }


def result(**environment: Any) -> Result:
    rows = [
        contender("eager", (2.0, 4.0), (6.0, 6.0)),
        contender("full_iteration", (1.0, 1.0), (2.0, 4.0)),
        {**FACTS, "contender": "compile", "reason": "no compiler"},
        {"case": "moe", "reason": "no time"},
    ]
    head = {"environment": {**ENVIRONMENT, **environment}, "options": {"seed": 0}}
    return Result(head, rows)
