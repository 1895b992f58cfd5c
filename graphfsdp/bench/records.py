"""What a benchmark has found, in frozen records, and these as JSON.

A result holds cases, one for each workload, precision and batch size. A case holds the contenders
that ran, and those that did not, each with the reason.
"""

import json
import math
import os
import re
import statistics
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from graphfsdp.errors import ConfigError

SCHEMA_VERSION = 2
KIND = "graphfsdp_bench"
# The contender that all others are compared with: our code path, run eagerly.
REFERENCE = "eager"
_NUMBERS = re.compile(r"\[\s+(-?[\d.][^\[\]{}\"]*?)\s+\]")


@dataclass(frozen=True)
class Spread:
    """The middle and the ends of a list of measurements."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.minimum:.2f} to {self.maximum:.2f})"


@dataclass(frozen=True)
class Distribution:
    """Where the times of single steps lie, in milliseconds."""

    num_steps: int
    median: float
    mean: float
    p5: float
    p95: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution":
        # Python 3.11 knows no quantiles of a single value.
        points = values if len(values) > 1 else [*values, *values]
        percent = [math.nan, *statistics.quantiles(points, n=100, method="inclusive")]
        return cls(
            num_steps=len(values),
            median=statistics.median(values),
            mean=statistics.fmean(values),
            p5=percent[5],
            p95=percent[95],
            p99=percent[99],
            maximum=max(values),
        )


@dataclass(frozen=True)
class Environment:
    """What the numbers were measured on; None is unknown or not there.

    ``date`` is UTC, ISO 8601 with seconds; threads are torch's on the CPU, in each process;
    ``load_average`` counts programs that ran before the start.
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
    """What was trained; batch size and FLOPs are of a step on one rank.

    ``family`` is "gpt", "llama", "moe" or "zoo", ``unit`` "tokens" or "samples". FLOPs are the
    matrix arithmetic of forward and backward, recomputation not counted.
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
        """Tokens or samples that one rank trains on in a step."""
        return self.batch_size * self.items_per_sample


@dataclass(frozen=True)
class PeakFacts:
    """Stated of one GPU by its data sheet; measured as the best of some large products."""

    stated_tflops: float | None
    measured_tflops: float
    measured_how: str


@dataclass(frozen=True)
class InitRecord:
    """What happened before the timed region; None where there was nothing of the kind.

    ``warmup_ms`` is of all steps until the first timed one, capture and compilation included;
    ``pool_bytes`` is the graph's pool, on a CPU the planned memory.
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

    The windows of all contenders took turns, so that window i of one ran beside window i of every
    other. ``host_ms`` is per step until the window's last call had returned: on a GPU the time that
    the host needs to launch. ``cpu_ms`` is per step, of all threads.
    """

    step_ms: tuple[tuple[float, ...], ...]
    host_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]

    @property
    def window_ms(self) -> tuple[float, ...]:
        return tuple(sum(window) / len(window) for window in self.step_ms)

    @property
    def steps(self) -> Distribution:
        return Distribution.of([step for window in self.step_ms for step in window])


@dataclass(frozen=True)
class MemoryRecord:
    """Peak memory of a contender.

    On a CPU of a process that runs nothing else, libraries included; of a GPU's allocator less
    what was there before.
    """

    how: str
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Of the allocator on a GPU, of the process on a CPU."""
        return self.process_bytes if self.allocated_bytes is None else self.allocated_bytes


@dataclass(frozen=True)
class ParityRecord:
    """Losses beside the reference's, over every step of the run; None is one not finite.

    ``early_difference`` is of the first ten steps, before rounding errors have had time to grow;
    ``first_difference`` counts steps from 0, and is None if none differs.
    """

    num_steps: int
    max_difference: float | None
    bit_exact: bool
    first_difference: int | None
    early_difference: float | None
    last_loss: float | None


@dataclass(frozen=True)
class ContenderResult:
    name: str
    description: str
    init: InitRecord
    timing: TimingRecord
    parity: ParityRecord
    memory: MemoryRecord | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotRun:
    """``detail`` is the end of a traceback or of a log, for who wants to know; may be empty."""

    name: str
    description: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class CaseResult:
    workload: WorkloadFacts
    peak: PeakFacts
    contenders: tuple[ContenderResult, ...]
    not_run: tuple[NotRun, ...] = ()

    def find(self, name: str) -> ContenderResult | None:
        return next((item for item in self.contenders if item.name == name), None)

    def ratios(self, name: str, base: str = REFERENCE) -> tuple[float, ...]:
        """How many times as fast as the base, by round; empty where one of them did not run."""
        return self._over(name, base, lambda timing: timing.window_ms)

    def speedup(self, name: str, base: str = REFERENCE) -> Spread | None:
        ratios = self.ratios(name, base)
        return Spread.of(ratios) if ratios else None

    def cpu_ratios(self, name: str) -> tuple[float, ...]:
        """As ``ratios``, of CPU time; other programs hardly change it, unlike a clock's."""
        return self._over(name, REFERENCE, lambda timing: timing.cpu_ms)

    def _over(
        self, name: str, base: str, ms: Callable[[TimingRecord], tuple[float, ...]]
    ) -> tuple[float, ...]:
        own, reference = self.find(name), self.find(base)
        if own is None or reference is None or not all(ms(own.timing)):
            return ()
        pairs = zip(ms(reference.timing), ms(own.timing), strict=True)
        return tuple(theirs / mine for theirs, mine in pairs)

    def items_per_s(self, own: ContenderResult) -> float:
        """Return tokens or samples per second on each rank, of the median step."""
        return self.workload.items_per_step / own.timing.steps.median * 1e3

    def tflops(self, own: ContenderResult) -> float:
        """Return model TFLOP/s on each rank, of the median step."""
        return self.workload.flops_per_step / own.timing.steps.median / 1e9


@dataclass(frozen=True)
class BenchResult:
    """``left_out`` holds cases that did not run at all, by key, and why."""

    environment: Environment
    options: Mapping[str, object]
    command: str
    seed: int
    cases: tuple[CaseResult, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    kind: str = KIND
    schema_version: int = SCHEMA_VERSION


def to_data(record: object) -> Any:
    """Numbers that are not finite become None, which JSON has and NaN is not."""
    if is_dataclass(record):
        return {item.name: to_data(getattr(record, item.name)) for item in fields(record)}
    if isinstance(record, Mapping):
        return {str(name): to_data(item) for name, item in record.items()}
    if isinstance(record, list | tuple):
        return [to_data(item) for item in record]
    return record if not isinstance(record, float) or math.isfinite(record) else None


def to_json(record: object) -> str:
    """Lists of numbers take one line each."""
    text = json.dumps(to_data(record), indent=1, allow_nan=False)
    return _NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"


def write_result(result: BenchResult, path: str | os.PathLike[str]) -> None:
    """The file is whole or not there."""
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.unfinished")
    unfinished.write_text(to_json(result), encoding="utf-8")
    os.replace(unfinished, target)


def read_result(path: str | os.PathLike[str]) -> BenchResult:
    """Also takes a result directory; refuses (ConfigError) what a later version has written."""
    source = Path(path)
    if source.is_dir():
        source = source / "result.json"
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source} cannot be read as a result of graphfsdp bench: {error}"
        ) from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ConfigError(
            f"{source} is not a result of graphfsdp bench (its kind is not {KIND!r}). Remedy: give "
            "the result.json of a result directory"
        )
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{source} has schema version {data.get('schema_version')}, this graphfsdp reads "
            f"{SCHEMA_VERSION}. Remedy: measure again, or use the graphfsdp that wrote it"
        )
    try:
        result: BenchResult = _read(BenchResult, data)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{source} is not as this graphfsdp writes results: {error}") from None
    return result


def _read(kind: Any, data: Any) -> Any:
    """Make a record, or tuples of records, of what ``to_data`` has made of it."""
    arguments = [item for item in typing.get_args(kind) if item is not type(None)]
    if type(None) in typing.get_args(kind):
        return None if data is None else _read(arguments[0], data)
    if typing.get_origin(kind) is tuple:
        return tuple(_read(arguments[0], item) for item in data)
    if not is_dataclass(kind):
        return data
    hints, make = typing.get_type_hints(kind), cast("Callable[..., Any]", kind)
    return make(**{name: _read(hints.get(name), item) for name, item in data.items()})
