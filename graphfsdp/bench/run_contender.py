"""One contender while it is measured: built, warmed up, timed, asked for its facts, closed."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphfsdp.bench.batches import Batch
from graphfsdp.bench.clock import Window, time_window
from graphfsdp.bench.contender import Contender, ContenderSpec, GraphFacts, Setting
from graphfsdp.bench.records import InitRecord, MemoryRecord, TimingRecord

# Three eager iterations, the capture, and two replays; torch.compile compiles in the first.
NUM_WARMUP_STEPS = 6
CUDA_ALLOCATOR = "torch's CUDA allocator, less what other contenders held"


@dataclass
class RunningContender:
    """A contender and what has been seen of it so far.

    Attributes:
        before: What a GPU's allocator held before the contender was built.
        losses: Of its steps, in pieces of [K] float32 each, on the device.
        windows: Of the timed region.
    """

    spec: ContenderSpec
    contender: Contender
    build_ms: float
    before: MemoryRecord
    warmup_ms: tuple[float, ...] = ()
    memory: MemoryRecord | None = None
    losses: list[Tensor] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def warm_up(self, batches: Sequence[Batch], device: torch.device) -> None:
        """Run the first steps, each timed with a sync after it.

        On a GPU the peak memory until here is measured, capture and compilation included.
        """
        times = []
        for index, batch in enumerate(batches):
            start = time.perf_counter()
            self.losses.append(self.contender(batch, index)[None])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() - start) * 1e3)
        self.warmup_ms = tuple(times)
        allocated, reserved = self.before.allocated_bytes, self.before.reserved_bytes
        if allocated is not None and reserved is not None:
            self.memory = MemoryRecord(
                CUDA_ALLOCATOR,
                allocated_bytes=torch.cuda.max_memory_allocated(device) - allocated,
                reserved_bytes=torch.cuda.max_memory_reserved(device) - reserved,
            )

    def time(self, batches: Sequence[Batch], first_step: int, device: torch.device) -> Window:
        """Run a window of steps."""
        losses: list[Tensor] = []

        def make(batch: Batch, index: int) -> Callable[[], None]:
            return lambda: losses.append(self.contender(batch, first_step + index))

        steps = [make(batch, index) for index, batch in enumerate(batches)]
        window = time_window(steps, device)
        self.losses.append(torch.stack(losses))
        return window

    def timing(self) -> TimingRecord:
        """Return the record of the timed region."""
        return TimingRecord(
            step_ms=tuple(window.step_ms for window in self.windows),
            host_ms=tuple(round(window.host_ms, 6) for window in self.windows),
            cpu_ms=tuple(round(window.cpu_ms, 6) for window in self.windows),
        )

    def init(self, facts: GraphFacts) -> InitRecord:
        """Return the record of what came before the timed region."""
        compile_ms = None
        if self.spec.compiles:
            usual = statistics.median(self.timing().window_ms)
            compile_ms = max(0.0, sum(self.warmup_ms[:2]) - 2 * usual)
        return InitRecord(
            build_ms=self.build_ms,
            warmup_ms=sum(self.warmup_ms),
            num_warmup_steps=len(self.warmup_ms),
            capture_ms=facts.capture_ms,
            compile_ms=compile_ms,
            num_nodes=facts.num_nodes,
            pool_bytes=facts.pool_bytes,
        )


def build_contender(spec: ContenderSpec, setting: Setting) -> RunningContender:
    """Build a contender, ready for its first step."""
    device = setting.device
    before = MemoryRecord(CUDA_ALLOCATOR)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = MemoryRecord(
            CUDA_ALLOCATOR,
            allocated_bytes=torch.cuda.memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
        )
    start = time.perf_counter()
    contender = spec.make(setting)
    return RunningContender(spec, contender, (time.perf_counter() - start) * 1e3, before)
