"""What was measured, and on what: the machine, the workload, the most that the machine can do."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """What the numbers were measured on.

    Attributes:
        date: Of the measurement, UTC, ISO 8601 with seconds.
        commit: Of the checkout, None for an installed package.
        versions: Of packages that matter, by name; those that are not installed are left out.
        num_threads: Threads of torch on the CPU, in each process.
        backend: Of the process group, None where there is none.
        gpu: Name of the device, None on a CPU.
        load_average: Programs that ran on the machine before the start; None where unknown.
    """

    date: str
    commit: str | None
    python: str
    torch: str
    versions: Mapping[str, str]
    system: str
    cpu: str
    num_cpus: int
    num_threads: int
    num_ranks: int = 1
    backend: str | None = None
    device: str = "cpu"
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    compute_capability: str | None = None
    driver: str | None = None
    cuda: str | None = None
    clock_mhz: float | None = None
    power_limit_w: float | None = None
    load_average: float | None = None


@dataclass(frozen=True)
class WorkloadFacts:
    """What was trained.

    Attributes:
        name: Of the preset.
        family: "gpt", "llama", "moe", "conv" or "bert".
        dtype: "fp32" or "bf16".
        batch_size: Samples per step on each rank.
        items_per_sample: Tokens of a sequence; 1 for an image.
        unit: What throughput counts: "tokens" or "images".
        data: Where the inputs come from.
        num_parameters: Trainable numbers of the whole model.
        flops_per_step: Matrix arithmetic of forward and backward of one step on one rank,
            recomputation not counted.
        flops_formula: How ``flops_per_step`` was found.
    """

    name: str
    family: str
    dtype: str
    batch_size: int
    items_per_sample: int
    unit: str
    data: str
    num_parameters: int
    flops_per_step: float
    flops_formula: str

    @property
    def key(self) -> str:
        """What two results have in common if they measured the same thing."""
        return f"{self.name} {self.dtype} x{self.batch_size}"

    @property
    def items_per_step(self) -> int:
        """Tokens or images that one rank trains on in a step."""
        return self.batch_size * self.items_per_sample


@dataclass(frozen=True)
class PeakFacts:
    """What the machine can do at most.

    Attributes:
        stated_tflops: Of one GPU, from its data sheet; None where there is none.
        measured_tflops: The best of some large products of random matrices in that dtype.
        measured_how: In words.
    """

    stated_tflops: float | None
    measured_tflops: float
    measured_how: str
