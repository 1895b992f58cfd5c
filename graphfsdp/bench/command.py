"""``graphfsdp bench``: flags whose help teaches; cases are measured, shown and kept."""

import dataclasses
import datetime
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from rich.console import Console

from graphfsdp.bench.contenders import CONTENDERS, TIMEOUT_MINUTES, Setting
from graphfsdp.bench.measure import NUM_THREADS, run_case
from graphfsdp.bench.mlperf import run_mlperf
from graphfsdp.bench.results import (
    NOT_MLPERF,
    RESULT,
    Result,
    case_table,
    environment_text,
    find_environment,
    overview,
)
from graphfsdp.bench.workloads import (
    SUITES,
    Case,
    DtypeName,
    SuiteName,
    find_workload,
    workloads,
)
from graphfsdp.cli import Parser, add_flags, print_line, require
from graphfsdp.errors import ConfigError
from graphfsdp.training.config import DeviceChoice
from graphfsdp.training.ranks import choose_device, find_ranks, process_group
from graphfsdp.training.run_directory import make_new_directory

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


@dataclass(frozen=True)
class BenchOptions:
    """Each field is a flag (``cli.add_flags``)."""

    suite: Annotated[SuiteName | None, "named cases (default: cpu or gpu, as the device is)"] = None
    workload: Annotated[
        list[str] | None,
        "workloads, listed below",
        "NAME",
        tuple(each.name for each in workloads()),
    ] = None
    batch_size: Annotated[
        list[int] | None,
        "samples per step on each rank; several make a sweep (default: each workload's own)",
    ] = None
    dtype: Annotated[list[DtypeName] | None, "precisions (default: fp32)"] = None
    contender: Annotated[
        list[str] | None,
        "contenders, listed below; eager is always among them (default: all)",
        "NAME",
        tuple(each.name for each in CONTENDERS),
    ] = None
    device: Annotated[DeviceChoice, "auto takes a GPU where there is one"] = "auto"
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

    def cases(self, device_type: str) -> tuple[Case, ...]:
        chosen = tuple(self.contender) if self.contender else None
        if self.workload:
            return tuple(
                Case(workload.name, dtype, size, chosen)
                for workload in map(find_workload, dict.fromkeys(self.workload))
                for dtype in dict.fromkeys(self.dtype or ("fp32",))
                for size in dict.fromkeys(self.batch_size or [workload.batch_size])
            )
        for name, value in (("--batch-size", self.batch_size), ("--dtype", self.dtype)):
            if value is not None:
                raise ConfigError(f"{name} goes with --workload; a suite has its own")
        cases = SUITES[self.suite or ("gpu" if device_type == "cuda" else "cpu")]
        return tuple(
            dataclasses.replace(each, contenders=chosen or each.contenders) for each in cases
        )


def parse_bench_arguments(arguments: Sequence[str]) -> BenchOptions:
    sizes = "".join(f"\n  {each.name:<21} {each.description}" for each in workloads())
    names = "".join(f"\n  {spec.name:<23} {spec.description}" for spec in CONTENDERS)
    parser = Parser(
        prog="graphfsdp bench",
        description=_ABOUT,
        epilog=f"workloads:{sizes}\n\ncontenders:{names}",
    )
    add_flags(parser, BenchOptions, {"suite": "what to measure", "seconds": "how"})
    return BenchOptions(**vars(parser.parse_args(arguments)))


_WIDTH = 160  # of a file or a pipe, whose tables would be narrow
# No case ends in less: Python and torch have to start.
SHORTEST_CASE_S = 20.0


def run_bench(arguments: Sequence[str], console: Console) -> int:
    """Return 1 where nothing could be measured, or there is no score.

    What is known is in the directory after each case, so that Ctrl-C loses little.
    """
    if "--mlperf" in arguments:
        return run_mlperf(arguments, console)
    options = parse_bench_arguments(arguments)
    ranks = find_ranks()
    device = choose_device(options.device, ranks)
    torch.set_num_threads(NUM_THREADS)
    width = None if console.is_terminal else max(console.width, _WIDTH)
    console = Console(file=console.file, width=width, quiet=not ranks.is_first)
    limit_s = math.inf if options.budget is None else options.budget * 60
    deadline = time.monotonic() + limit_s
    with process_group(ranks, device, timeout_minutes=TIMEOUT_MINUTES) as ranks:
        cases = options.cases(device.type)
        out = options.out or f"runs/bench-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        # An impossible one is refused before anything is measured.
        path = ranks.first(lambda: make_new_directory(out)) / RESULT
        environment = find_environment(device, num_ranks=ranks.size)
        asked = dataclasses.asdict(options)
        del asked["out"]  # where it was on this machine is nobody's business
        result = Result({"environment": environment, "options": asked})
        print_line(console, environment_text(environment))
        for number, case in enumerate(cases):
            print_line(console, f"{case.key} ({number + 1} of {len(cases)})")
            left_s = ranks.gather(deadline - time.monotonic())[0]
            # It may take three times its share of the time left.
            limit_s = min(left_s, max(3 * left_s / (len(cases) - number), SHORTEST_CASE_S))
            try:
                if left_s < SHORTEST_CASE_S:
                    raise ConfigError(f"the budget of {options.budget:g} min was spent")
                result.rows += run_case(Setting(case, device, ranks, options.seconds, limit_s))
                console.print(case_table(result, case.key).rich())
            except ConfigError as error:
                result.rows.append({"case": case.key, "reason": str(error)})
            for row in result.rows:
                if row["case"] == case.key and "reason" in row:
                    who = f"did not run: {row['contender']}" if "contender" in row else "left out"
                    print_line(console, f"{who}: {row['reason']}", "yellow")
            if ranks.is_first:
                result.write(path)
    if not result.cases:
        return 1
    console.print(overview(result).rich())
    for line in (NOT_MLPERF, f"wrote {path}"):
        print_line(console, line)
    return 0
