"""The tables of docs/scale.md: two models on 8 to 16,384 GPUs, by plan and by formula.

Nothing is measured: layout and schedule decide bytes, assumed speeds the times.

    python -m benchmarks.scale_table          # rewrites the tables; minutes
"""

import math
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.readme_table import with_section
from graphfsdp.bench.tables import Table
from graphfsdp.planning.model_plan import Collective
from graphfsdp.planning.training_plan import Speeds, TrainingPlan, estimate_time, plan_training
from graphfsdp.training.arguments import parse_train_arguments

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "scale.md"
NUM_RANKS = (8, 64, 512, 4096, 16384)
GPUS_OF_A_MACHINE = 8
_GIB = 2**30
# What each GPU sends in one direction. Source: NVIDIA's data sheets of H100 (NVLink, 900 GB/s in
# both directions together) and ConnectX-7 (400 Gb/s, one for each GPU of a machine).
NVLINK = Speeds(bandwidth_gbs=450.0, latency_us=5.0)
NETWORK = Speeds(bandwidth_gbs=50.0, latency_us=5.0)
# Rings through all GPUs of several machines leave a machine once for its eight GPUs, each of eight
# rings by another adapter.
BOTH = Speeds(bandwidth_gbs=GPUS_OF_A_MACHINE * 50.0, latency_us=5.0)
# Beyond so much padding, optimizer state is not cut over the outer axis too.
_MOST_PADDING = 0.02
# Unexpected interruptions of 16,384 GPUs in 54 days.
# Source: Grattafiori et al. 2024, section 3.3.4 (arXiv:2407.21783).
_INTERRUPTIONS, _GPU_DAYS = 419, 16384 * 54


@dataclass(frozen=True)
class Run:
    """A model, and how many ranks its weights are cut over before they are repeated."""

    name: str
    preset: str
    seq_length: int
    inner: int

    def plan(self, num_ranks: int) -> TrainingPlan:
        instances = max(num_ranks // self.inner, 1)
        flags = ["--preset", self.preset, "--seq-length", str(self.seq_length)]
        flags += ["--data-parallel-sharding-strategy", "optim_grads_params"]
        if instances == 1:
            return plan_training(parse_train_arguments(flags), num_ranks=num_ranks)
        flags += ["--num-distributed-optimizer-instances", str(instances)]
        everywhere = parse_train_arguments([*flags, "--outer-dp-sharding-strategy", "optim"])
        plan = plan_training(everywhere, num_ranks=num_ranks)
        if plan.model.num_padding <= _MOST_PADDING * plan.model.num_parameters:
            return plan
        return plan_training(parse_train_arguments(flags), num_ranks=num_ranks)


RUNS = (Run("8B", "llama3-8b", 8192, 8), Run("70B", "llama3-70b", 2048, 64))


def speeds_of(call: Collective, plan: TrainingPlan) -> Speeds:
    """Ranks of a machine are neighbours, so the inner axis fills machines."""
    if call.unit.endswith("outer axis"):
        return NETWORK
    return BOTH if plan.model.mesh.num_inner > GPUS_OF_A_MACHINE else NVLINK


def milliseconds(calls: Iterable[Collective], plan: TrainingPlan) -> float:
    return sum(estimate_time(0, [c], speeds_of(c, plan)).communication_ms for c in calls)


def row(run: Run, num_ranks: int) -> tuple[str, ...]:
    plan = run.plan(num_ranks)
    mesh, model = plan.model.mesh, plan.model
    calls = model.collectives()
    sent = {
        speeds: sum(call.wire_bytes for call in calls if speeds_of(call, plan) is speeds)
        for speeds in (NVLINK, NETWORK, BOTH)
    }
    # In a graph one collective follows the other, so the links add up. However well the rest
    # overlaps, the first gather and the last reduction have nothing to hide behind.
    communication_ms = milliseconds(calls, plan)
    edges_ms = milliseconds([replace(call, count=1) for call in calls[:2]], plan)
    compute_ms = plan.time.compute_ms
    cut_over = mesh.num_ranks if mesh.cuts_outside else mesh.num_inner
    return (
        run.name,
        f"{num_ranks:,}",
        f"{mesh.num_inner} x {mesh.num_outer}",
        f"{cut_over:,}",
        f"{plan.batch.num_tokens / 1e6:,.2f}",
        f"{(plan.total_bytes - plan.activations.peak_bytes) / _GIB:.1f}",
        f"{plan.activations.peak_bytes / _GIB:.1f}",
        f"{(sent[NVLINK] + sent[BOTH]) / _GIB:.1f}",
        f"{(sent[NETWORK] + sent[BOTH] / GPUS_OF_A_MACHINE) / _GIB:.1f}",
        f"{compute_ms:,.0f}",
        f"{communication_ms:,.0f}",
        f"{max(communication_ms - compute_ms, edges_ms):,.0f}",
        f"{100 * model.num_padding / model.num_parameters:.2f}",
    )


def plans() -> str:
    heading = (
        *("model", "GPUs", "weights cut over x repeated", "optimizer state cut over"),
        "10^6 tokens an iteration",
        *("state and pool, GiB", "activations, ~ GiB"),
        *("sent by NVLink, GiB", "by network, GiB"),
        *("arithmetic, ms", "communication, ms", "exposed at least, ms", "padding, %"),
    )
    return Table("", heading, [row(run, num) for run in RUNS for num in NUM_RANKS]).markdown()


def bubbles() -> str:
    """Source: Narayanan et al. 2021, section 2.2 (arXiv:2104.04473)."""
    found = []
    for stages in (2, 4, 8, 16):
        cells = []
        for chunks in (1, 2):
            for microbatches in (8, 32, 128):
                # Of the whole iteration; the source's share is of the ideal one.
                idle = (stages - 1) / chunks
                cells.append(f"{100 * idle / (microbatches + idle):.1f}")
        found.append((str(stages), *cells))
    heading = (
        "stages",
        *(f"1F1B, {m} micro-batches" for m in (8, 32, 128)),
        *(f"interleaved by 2, {m}" for m in (8, 32, 128)),
    )
    return Table("", heading, found).markdown()


def failures() -> str:
    """Source: Young 1974: save every sqrt(2 x time of a save x time between failures)."""
    found = []
    for num_ranks in NUM_RANKS:
        between_s = _GPU_DAYS * 86400 / _INTERRUPTIONS / num_ranks
        cells = []
        for save_s in (5, 60):
            interval_s = math.sqrt(2 * save_s * between_s)
            lost = save_s / interval_s + interval_s / 2 / between_s
            cells += [f"{interval_s / 60:,.0f}", f"{100 * lost:.1f}"]
        found.append((f"{num_ranks:,}", f"{between_s / 3600:,.1f}", *cells))
    heading = (
        *("GPUs", "hours between failures"),
        *("save every, min (a save stops training for 5 s)", "time lost, %"),
        *("save every, min (60 s)", "time lost, %"),
    )
    return Table("", heading, found).markdown()


def main() -> None:
    text = PAGE.read_text()
    for make in (plans, bubbles, failures):
        text = with_section(text, make.__name__, make)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
