"""Results of the benchmark that nobody measured, for tests of what is made of them."""

import dataclasses

from graphfsdp.bench import records


def contender(name: str, *windows: tuple[float, ...]) -> records.ContenderResult:
    return records.ContenderResult(
        name=name,
        description=f"{name} it is",
        init=records.InitRecord(build_ms=1.5, warmup_ms=20.0, num_warmup_steps=5, num_nodes=7),
        timing=records.TimingRecord(windows, (0.5,) * len(windows), (2.0,) * len(windows)),
        parity=records.ParityRecord(10, 0.0, True, None, 0.0, 3.25),
        memory=records.MemoryRecord("a process of its own", process_bytes=2**28),
        notes=("a note",),
    )


def case(stated_tflops: float | None = None) -> records.CaseResult:
    return records.CaseResult(
        workload=records.WorkloadFacts(
            name="gpt-tiny",
            family="gpt",
            dtype="fp32",
            batch_size=4,
            items_per_sample=32,
            unit="tokens",
            data="text",
            num_parameters=1000,
            flops_per_step=6e9,
            flops_formula="6 N + 12 L C T",
        ),
        peak=records.PeakFacts(stated_tflops, 0.05, "the best of 5 products"),
        contenders=(
            contender("eager", (2.0, 4.0), (6.0, 6.0)),
            contender("full_iteration", (1.0, 1.0), (2.0, 4.0)),
        ),
        not_run=(records.NotRun("compile", "torch.compile", "no compiler", "Traceback"),),
    )


def result(**changes: object) -> records.BenchResult:
    environment = records.Environment(
        date="2026-01-02T03:04:05",
        commit=None,
        python="3.11",
        torch="2.13.0",
        versions={"numpy": "2.0"},
        system="Linux x86_64",
        cpu="some CPU",
        num_cpus=2,
        num_threads=1,
    )
    made = records.BenchResult(
        environment, {"seed": 0, "cases": ["a"]}, "bench", 0, (case(),), {"moe": "no time"}
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]
