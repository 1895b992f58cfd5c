"""What a benchmark has found, in frozen records; ``record_files`` writes and reads them as JSON.

A result holds cases, one for each workload, precision and batch size. A case holds the contenders
that ran, and those that did not, each with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphfsdp.bench.facts import Environment, PeakFacts, WorkloadFacts
from graphfsdp.bench.spread import Distribution, Spread, paired_ratios

SCHEMA_VERSION = 1
KIND = "graphfsdp_bench"
# The contender that all others are compared with: our code path, run eagerly.
REFERENCE = "eager"
NOT_ASKED = "not asked for in this case"


@dataclass(frozen=True)
class InitRecord:
    """What happened before the timed region.

    Attributes:
        build_ms: Model, optimizer, sharding.
        warmup_ms: All steps until the first timed one, capture and compilation included.
        num_warmup_steps: How many those were.
        capture_ms: The capture itself; None without one.
        compile_ms: What torch.compile spent; None without it.
        num_nodes: Of the graph; None without one, or where the driver does not tell.
        pool_bytes: Memory of the graph's pool; on a CPU the planned memory.
    """

    build_ms: float
    warmup_ms: float
    num_warmup_steps: int
    capture_ms: float | None = None
    compile_ms: float | None = None
    num_nodes: int | None = None
    pool_bytes: int | None = None


@dataclass(frozen=True)
class TimingRecord:
    """The timed region: windows of steps with no host sync inside.

    Attributes:
        step_ms: Milliseconds of each step, by window; the windows of all contenders took turns,
            so that window i of one ran beside window i of every other.
        host_ms: Milliseconds per step until the window's last call had returned, by window: on a
            GPU the time that the host needs to launch.
        cpu_ms: CPU time of the process per step, all threads, by window.
    """

    step_ms: tuple[tuple[float, ...], ...]
    host_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]

    @property
    def window_ms(self) -> tuple[float, ...]:
        """Milliseconds per step, by window."""
        return tuple(sum(window) / len(window) for window in self.step_ms)

    @property
    def steps(self) -> Distribution:
        """Where the times of single steps lie."""
        return Distribution.of([step for window in self.step_ms for step in window])


@dataclass(frozen=True)
class MemoryRecord:
    """Peak memory of a contender.

    Attributes:
        how: How it was measured.
        process_bytes: Peak resident memory of a process that runs nothing else.
        init_bytes: The same less what the libraries need, up to the first timed step.
        steps_bytes: Likewise, of later steps alone.
        allocated_bytes: Peak of a GPU's allocator, less what was there before.
        reserved_bytes: Peak of what the allocator took from the driver, likewise.
    """

    how: str
    process_bytes: int | None = None
    init_bytes: int | None = None
    steps_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True)
class ParityRecord:
    """Losses beside the reference's, over every step of the run, timed ones included.

    Attributes:
        num_steps: How many losses were compared.
        max_difference: Largest absolute difference; None where one is not finite.
        bit_exact: All losses are equal bit for bit.
        first_difference: Number of the first step whose losses differ, from 0; None if none does.
        early_difference: Largest absolute difference in the first ten steps, before rounding
            errors have had time to grow.
        last_loss: Of the last step; None where it is not finite.
    """

    num_steps: int
    max_difference: float | None
    bit_exact: bool
    first_difference: int | None
    early_difference: float | None
    last_loss: float | None


@dataclass(frozen=True)
class RooflineRecord:
    """How far an iteration is from the time that its kernels alone take.

    Attributes:
        how: How the kernels were timed.
        kernel_ms: Sum over the kernels (GPU) or operators (CPU) of one iteration.
        num_kernels: How many there are in one iteration.
        ratio: Median time of a step over ``kernel_ms``; 1 is the limit if no two kernels overlap.
    """

    how: str
    kernel_ms: float
    num_kernels: float
    ratio: float


@dataclass(frozen=True)
class ContenderResult:
    """One contender of a case."""

    name: str
    description: str
    init: InitRecord
    timing: TimingRecord
    parity: ParityRecord
    memory: MemoryRecord | None = None
    roofline: RooflineRecord | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotRun:
    """A contender that did not run, and why.

    Attributes:
        name: Of the contender.
        reason: One sentence.
        detail: The end of a traceback or of a log, for who wants to know; may be empty.
    """

    name: str
    description: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class CaseResult:
    """One workload in one precision and batch size, under all contenders."""

    workload: WorkloadFacts
    peak: PeakFacts
    contenders: tuple[ContenderResult, ...]
    not_run: tuple[NotRun, ...] = ()

    def find(self, name: str) -> ContenderResult | None:
        """Return the contender of that name, None if it did not run."""
        return next((item for item in self.contenders if item.name == name), None)

    def ratios(self, name: str, base: str = REFERENCE) -> tuple[float, ...]:
        """Return how many times as fast as the base a contender was, round by round.

        Empty where one of the two did not run.
        """
        own, reference = self.find(name), self.find(base)
        if own is None or reference is None:
            return ()
        return tuple(paired_ratios(reference.timing.window_ms, own.timing.window_ms))

    def speedup(self, name: str, base: str = REFERENCE) -> Spread | None:
        """Return the spread of ``ratios``, None where there are none."""
        ratios = self.ratios(name, base)
        return Spread.of(ratios) if ratios else None

    def cpu_ratios(self, name: str, base: str = REFERENCE) -> tuple[float, ...]:
        """Return how many times as much CPU time the base needed, round by round.

        Other programs on the machine hardly change it, unlike the time on a clock.
        """
        own, reference = self.find(name), self.find(base)
        if own is None or reference is None or not all(own.timing.cpu_ms):
            return ()
        return tuple(paired_ratios(reference.timing.cpu_ms, own.timing.cpu_ms))

    def items_per_s(self, name: str) -> float | None:
        """Return tokens or images per second on each rank, of the median step."""
        own = self.find(name)
        return None if own is None else self.workload.items_per_step / own.timing.steps.median * 1e3

    def tflops(self, name: str) -> float | None:
        """Return model TFLOP/s on each rank, of the median step."""
        own = self.find(name)
        if own is None:
            return None
        return self.workload.flops_per_step / own.timing.steps.median / 1e9

    def mfu(self, name: str) -> float | None:
        """Return the share of the stated peak that the model's arithmetic makes; None without."""
        tflops = self.tflops(name)
        if tflops is None or self.peak.stated_tflops is None:
            return None
        return tflops / self.peak.stated_tflops

    def measured_utilization(self, name: str) -> float | None:
        """Return the same share of the measured peak."""
        tflops = self.tflops(name)
        return None if tflops is None else tflops / self.peak.measured_tflops


@dataclass(frozen=True)
class BenchResult:
    """A whole run of ``graphfsdp bench``.

    Attributes:
        options: The command's options, seed included, as plain values.
        command: The command line.
        left_out: Cases that did not run at all, by key, and why.
    """

    environment: Environment
    options: Mapping[str, object]
    command: str
    seed: int
    cases: tuple[CaseResult, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    kind: str = KIND
    schema_version: int = SCHEMA_VERSION

    def find(self, key: str) -> CaseResult | None:
        """Return the case of that key (``WorkloadFacts.key``), None if there is none."""
        return next((case for case in self.cases if case.workload.key == key), None)


__all__ = [
    *("KIND", "NOT_ASKED", "REFERENCE", "SCHEMA_VERSION", "BenchResult", "CaseResult"),
    *("ContenderResult", "InitRecord", "MemoryRecord", "NotRun", "ParityRecord"),
    *("RooflineRecord", "TimingRecord"),
]
