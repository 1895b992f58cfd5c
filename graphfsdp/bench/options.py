"""The flags of ``graphfsdp bench``, with help that teaches."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphfsdp.bench.contenders import CONTENDERS, find_contenders
from graphfsdp.bench.workloads import (
    DTYPES,
    SUITES,
    DtypeName,
    PlannedCase,
    find_workload,
    plan_cases,
    suite,
    workloads,
)
from graphfsdp.command_line import Parser
from graphfsdp.config import ShardingStrategy
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
  graphfsdp bench --suite quick                                 one small case, half a minute
  graphfsdp bench --workload gpt-tiny --batch-size 1 4 16 64    where does the gain end?
  graphfsdp bench --workload gpt2-124m --dtype bf16 --contender full_iteration compile
  torchrun --nproc-per-node 2 -m graphfsdp bench --workload gpt-tiny
  graphfsdp bench compare A B                                   two results, and a gate for CI
  graphfsdp bench --mlperf --help                               time to a target, as MLPerf has it
"""


@dataclass(frozen=True)
class BenchOptions:
    """Each field is a flag, whose help says what it does."""

    suite: str | None = None
    workload: tuple[str, ...] = ()
    batch_size: tuple[int, ...] | None = None
    dtype: tuple[DtypeName, ...] | None = None
    contender: tuple[str, ...] | None = None
    data: str | None = None
    random_tokens: bool = False
    seconds: float = 15.0
    budget: float | None = None
    seed: int = 0
    threads: int = 1
    device: DeviceChoice = "auto"
    strategy: str | None = None
    memory: bool = True
    roofline: bool = True
    pictures: bool = True
    profile: bool = False
    nsys: bool = False
    out: str | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "budget"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name} must be greater than 0, got {value}")
        for name, minimum in (("threads", 1), ("seed", 0)):
            if getattr(self, name) < minimum:
                raise ConfigError(f"--{name} must be at least {minimum}, got {getattr(self, name)}")
        if self.suite is not None and self.workload:
            raise ConfigError("--suite and --workload both say what to measure; give one of them")
        if self.data is not None and self.random_tokens:
            raise ConfigError("--data and --random-tokens both say what to train on; give one")
        if self.profile and self.nsys:
            raise ConfigError(
                "--profile and --nsys would both listen to the GPU, which one of them can at a "
                "time; give one"
            )
        for size in self.batch_size or ():
            if size < 1:
                raise ConfigError(f"--batch-size must be at least 1, got {size}")
        for name in self.workload:
            find_workload(name)
        find_contenders(self.contender)
        if self.strategy is not None:
            ShardingStrategy.parse(self.strategy)

    def cases(self, device_type: str) -> tuple[PlannedCase, ...]:
        if self.workload:
            return plan_cases(
                self.workload,
                self.batch_size,
                self.dtype or ("fp32",),
                self.contender,
                memory=self.memory,
            )
        for name, value in (("--batch-size", self.batch_size), ("--dtype", self.dtype)):
            if value is not None:
                raise ConfigError(f"{name} goes with --workload; a suite has its own")
        name = self.suite or ("gpu" if device_type == "cuda" else "cpu")
        return tuple(
            PlannedCase(each.case, self.contender or each.contenders, each.memory and self.memory)
            for each in suite(name)
        )


def parse_bench_arguments(arguments: Sequence[str]) -> BenchOptions:
    given = vars(make_parser().parse_args(arguments))
    lists = ("workload", "batch_size", "dtype", "contender")
    values: dict[str, Any] = {
        name: tuple(value) if name in lists else value for name, value in given.items()
    }
    return BenchOptions(**values)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; a flag that is not given leaves no trace in the result."""
    sizes = "".join(f"\n  {each.name:<21} {each.description}" for each in workloads())
    names = "".join(f"\n  {spec.name:<23} {spec.description}" for spec in CONTENDERS)
    parser = Parser(
        prog="graphfsdp bench",
        description=_ABOUT,
        epilog=f"workloads:{sizes}\n\ncontenders:{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    _add_what(parser)
    _add_how(parser)
    return parser


def _add_what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to measure")
    group.add_argument(
        "--suite", choices=SUITES, help="named cases (default: cpu or gpu, as the device is)"
    )
    group.add_argument("--workload", nargs="+", metavar="NAME", help="workloads, listed below")
    group.add_argument(
        "--batch-size", nargs="+", type=int, metavar="N", help="samples per step on each rank; "
        "several make a sweep (default: each workload's own)",
    )  # fmt: skip
    group.add_argument("--dtype", nargs="+", choices=DTYPES, help="precisions (default: fp32)")
    group.add_argument(
        "--contender", nargs="+", metavar="NAME", help="contenders, listed below; eager is always "
        "among them (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--data", metavar="PATH", help="text to train on, as 'graphfsdp train --data' takes it "
        "(default: the source files of Python's standard library)",
    )  # fmt: skip
    group.add_argument("--random-tokens", action="store_true", help="uniform tokens, no text")
    group.add_argument("--seed", type=int, metavar="N", help="decides weights and batches (0)")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    group.add_argument(
        "--strategy", choices=[strategy.value for strategy in ShardingStrategy],
        help="what graphfsdp cuts where there are several ranks (default: optim_grads_params, "
        "which is what FSDP2 does)",
    )  # fmt: skip


def _add_how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    group.add_argument(
        "--seconds", type=float, metavar="X", help="timed region of a case, all contenders "
        "together (default: 15); at least 5 rounds are run",
    )  # fmt: skip
    group.add_argument(
        "--budget", type=float, metavar="MINUTES", help="cases that do not fit are listed as "
        "left out (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--threads", type=int, metavar="N", help="threads of torch on a CPU (default: 1; steps of "
        "small models are too short to share)",
    )  # fmt: skip
    for name, explanation in (
        ("memory", "on a CPU, run each contender again in a process of its own for its memory"),
        ("roofline", "time the kernels (GPU) or operators (CPU) of an iteration"),
        ("pictures", "draw pictures, where matplotlib is installed"),
    ):
        group.add_argument(
            f"--{name}",
            action=argparse.BooleanOptionalAction,
            help=f"{explanation} (default: on)",
        )
    group.add_argument(
        "--profile", action="store_true", help="then run some more steps of each contender under "
        "torch's profiler: a Chrome trace with phases and units, the largest kernels and gaps",
    )  # fmt: skip
    group.add_argument(
        "--nsys", action="store_true", help="then run some more steps of each contender between "
        "cudaProfilerStart and Stop, for 'nsys profile --capture-range=cudaProfilerApi'; without "
        "rooflines, which need the same interface",
    )  # fmt: skip
    group.add_argument(
        "--out", metavar="DIR", help="result directory, new or empty (default: a new one in runs/)"
    )
