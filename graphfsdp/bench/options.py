"""The flags of ``graphfsdp bench``, with help that teaches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal

from graphfsdp.bench.contenders import CONTENDERS, find_contenders
from graphfsdp.bench.workloads import (
    Case,
    DtypeName,
    SuiteName,
    find_workload,
    suite,
    workloads,
)
from graphfsdp.command_line import Parser, add_flags, require
from graphfsdp.errors import ConfigError
from graphfsdp.training.config import DeviceChoice

_ABOUT = """\
Measure what whole-iteration capture brings, beside what people would use instead.

All contenders of a case live in one process, begin with the same weights, see the same batches
(another one in each step) and the same learning rates, and take turns in short windows: whatever
slows the machine down slows all of them. Ratios are taken within a round. Within a window nothing
waits for the device. Compilation, warm-up and capture happen before and are reported apart.
Whatever cannot run here is listed with the reason.

A graph saves launches. Expect much where steps are short and little or nothing where arithmetic
is the limit: measure both kinds. Sizes and batch sizes are a sweep:

  graphfsdp bench                                               the suite for this machine
  graphfsdp bench --suite quick                                 one small case
  graphfsdp bench --workload gpt-tiny --batch-size 1 4 16 64    where does the gain end?
  graphfsdp bench --workload gpt2-124m --dtype bf16 --contender full_iteration compile
  torchrun --nproc-per-node 2 -m graphfsdp bench --workload gpt-tiny
  graphfsdp bench --mlperf --help                               time to a target, as MLPerf has it
"""


_SECTIONS: Mapping[str, str] = MappingProxyType({"suite": "what to measure", "seconds": "how"})


@dataclass(frozen=True)
class BenchOptions:
    """Each field is a flag (``command_line.add_flags``)."""

    suite: Annotated[SuiteName | None, "named cases (default: cpu or gpu, as the device is)"] = None
    workload: Annotated[tuple[str, ...] | None, "workloads, listed below", "NAME"] = None
    batch_size: Annotated[
        tuple[int, ...] | None,
        "samples per step on each rank; several make a sweep (default: each workload's own)",
    ] = None
    dtype: Annotated[tuple[DtypeName, ...] | None, "precisions (default: fp32)"] = None
    contender: Annotated[
        tuple[str, ...] | None,
        "contenders, listed below; eager is always among them (default: all)",
        "NAME",
    ] = None
    device: Annotated[DeviceChoice, "auto takes a GPU where there is one"] = "auto"
    compile: Annotated[
        Literal["on", "auto"],
        "what compiled_recording compiles on a CPU: everything, or what is faster so",
    ] = "auto"
    seconds: Annotated[
        float, "timed region of a case, all contenders together; at least 5 rounds are run"
    ] = 15.0
    budget: Annotated[
        float | None, "cases that do not fit are listed as left out (default: no limit)", "MINUTES"
    ] = None
    out: Annotated[
        str | None, "result directory, new or empty (default: a new one in runs/)", "DIR"
    ] = None

    def __post_init__(self) -> None:
        for name in ("seconds", "budget"):
            value = getattr(self, name)
            if value is not None:
                require(name, value, value > 0, "greater than 0")
        for size in self.batch_size or ():
            require("batch_size", size, size >= 1, "at least 1")
        if self.suite is not None and self.workload:
            raise ConfigError("--suite and --workload both say what to measure; give one of them")
        for name in self.workload or ():
            find_workload(name)
        find_contenders(self.contender)

    def cases(self, device_type: str) -> tuple[Case, ...]:
        if self.workload:
            return tuple(
                Case(workload, dtype, size, self.contender)
                for workload in map(find_workload, dict.fromkeys(self.workload))
                for dtype in dict.fromkeys(self.dtype or ("fp32",))
                for size in dict.fromkeys(self.batch_size or [workload.batch_size])
            )
        for name, value in (("--batch-size", self.batch_size), ("--dtype", self.dtype)):
            if value is not None:
                raise ConfigError(f"{name} goes with --workload; a suite has its own")
        cases = suite(self.suite or ("gpu" if device_type == "cuda" else "cpu"))
        return tuple(replace(each, contenders=self.contender or each.contenders) for each in cases)


def parse_bench_arguments(arguments: Sequence[str]) -> BenchOptions:
    given = vars(make_parser().parse_args(arguments))
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
    return BenchOptions(**given)


def make_parser() -> Parser:
    sizes = "".join(f"\n  {each.name:<21} {each.description}" for each in workloads())
    names = "".join(f"\n  {spec.name:<23} {spec.description}" for spec in CONTENDERS)
    parser = Parser(
        prog="graphfsdp bench",
        description=_ABOUT,
        epilog=f"workloads:{sizes}\n\ncontenders:{names}",
    )
    add_flags(parser, BenchOptions, _SECTIONS)
    return parser
