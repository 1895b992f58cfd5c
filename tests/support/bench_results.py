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
    "data": "text",
    "num_parameters": 1000,
    "flops_per_step": 6e9,
    "flops_formula": "6 N + 12 L C T",
    "stated_tflops": None,
}
ENVIRONMENT: Row = {
    "date": "2026-01-02T03:04:05",
    "python": "3.11",
    "torch": "2.13.0",
    "versions": {"numpy": "2.0"},
    "cpu": "some CPU",
    "num_cpus": 2,
    "num_threads": 1,
    "num_ranks": 1,
    "load_average": None,
    "gpu": None,
    "driver": None,
}


def contender(name: str, *windows: tuple[float, ...], cpu_ms: float = 2.0) -> Row:
    return {
        **FACTS,
        "contender": name,
        "description": f"{name} it is",
        "build_ms": 1.5,
        "warmup_ms": 20.0,
        "capture_ms": None,
        "num_nodes": 7,
        "pool_bytes": None,
        "step_ms": [list(window) for window in windows],
        "host_ms": [0.5] * len(windows),
        "cpu_ms": [cpu_ms] * len(windows),
        "num_steps": 10,
        "max_difference": 0.0,
        "bit_exact": True,
        "first_difference": None,
        "early_difference": 0.0,
        "last_loss": 3.25,
        "memory_bytes": None,
        "reserved_bytes": None,
        "notes": ["a note"],
    }


def result(**environment: Any) -> Result:
    rows = [
        contender("eager", (2.0, 4.0), (6.0, 6.0)),
        contender("full_iteration", (1.0, 1.0), (2.0, 4.0)),
        {**FACTS, "contender": "compile", "reason": "no compiler"},
        {"case": "moe", "reason": "no time"},
    ]
    head = {"environment": {**ENVIRONMENT, **environment}, "options": {"seed": 0}, "command": "b"}
    return Result(head, rows)
