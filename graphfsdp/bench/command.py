"""``graphfsdp bench``: measure, show, keep."""

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from graphfsdp.bench.case_process import CaseFailedError
from graphfsdp.bench.compare_command import run_compare
from graphfsdp.bench.environment import describe, find_environment
from graphfsdp.bench.facts import Environment
from graphfsdp.bench.measure import Say
from graphfsdp.bench.mlperf_command import run_mlperf
from graphfsdp.bench.options import BenchOptions, parse_bench_arguments
from graphfsdp.bench.profiling import NSYS_NOTE
from graphfsdp.bench.records import BenchResult, CaseResult
from graphfsdp.bench.result_directory import PROFILES, make_directory, write_directory
from graphfsdp.bench.suites import PlannedCase
from graphfsdp.bench.sweep import Sweep
from graphfsdp.bench.tables import (
    NOT_MLPERF,
    cpu_overview,
    memory_overview,
    not_run_table,
    overview,
    short_table,
)
from graphfsdp.errors import ConfigError
from graphfsdp.training.build import choose_device
from graphfsdp.training.ranks import Ranks, find_ranks, process_group

_TIMEOUT_MINUTES = 30
_BUSY = 0.5
_WIDTH = 160  # of a file or a pipe


def run_bench(arguments: Sequence[str], console: Console) -> int:
    """Carry out ``graphfsdp bench``, ``graphfsdp bench compare`` or ``graphfsdp bench --mlperf``.

    Returns:
        0, or 1 where no case could be measured, two results differ for the worse, or the runs to
        a target have no score.

    Raises:
        ConfigError: a flag, or a combination of flags, that cannot work.
        SystemExit: ``--help`` was asked for and printed.
    """
    if arguments[:1] == ["compare"]:
        return run_compare(arguments[1:], console)
    if "--mlperf" in arguments:
        return run_mlperf(arguments, console)
    options = parse_bench_arguments(arguments)
    ranks = find_ranks()
    if options.strategy is not None and not ranks.launched:
        raise ConfigError(
            "--strategy says what is cut over several ranks, and this is one process; start them "
            "with torchrun --nproc-per-node N -m graphfsdp bench ..."
        )
    device = choose_device(options.device, ranks)
    torch.set_num_threads(options.threads)
    command = shlex.join(["graphfsdp", "bench", *arguments])
    with process_group(ranks, device, timeout_minutes=_TIMEOUT_MINUTES) as backend:
        return _Bench(options, ranks, device, backend, console, command).run()


class _Bench:
    def __init__(
        self,
        options: BenchOptions,
        ranks: Ranks,
        device: torch.device,
        backend: str | None,
        console: Console,
        command: str,
    ) -> None:
        self._options, self._ranks, self._device = options, ranks, device
        width = None if console.is_terminal else _WIDTH
        self._console = Console(file=console.file, width=width, quiet=not ranks.is_first)
        self._command = command
        self._environment: Environment = find_environment(
            device, num_threads=options.threads, num_ranks=ranks.size, backend=backend
        )

    def run(self) -> int:
        planned = self._options.cases(self._device.type)
        folder = self._ranks.decide(
            lambda: make_directory(self._options.out) if self._ranks.is_first else None
        )
        self._greet()
        cases, left_out = self._measure(planned, folder)
        if not cases:
            return 1
        self._finish(self._result(cases, left_out))
        if folder is not None:
            result = self._result(cases, left_out)
            write_directory(result, folder, pictures=self._options.pictures)
            names = ", ".join(sorted(path.name for path in folder.iterdir()))
            self._line(f"wrote {folder}: {names}")
            if self._options.profile:
                self._line(
                    f"profiles in {folder / PROFILES}: a timeline, a summary and its numbers for "
                    "each contender"
                )
        return 0

    def _measure(
        self, planned: Sequence[PlannedCase], folder: Path | None
    ) -> tuple[list[CaseResult], dict[str, str]]:
        """Measure the speed of all cases, then the memory of those that want it.

        What is known is in the directory after each case, so that Ctrl-C loses little.
        """
        found: dict[str, CaseResult] = {}
        left_out: dict[str, str] = {}
        with _progress(self._console) as progress:
            task = progress.add_task("", total=len(planned))
            sweep = Sweep(self._options, self._device, self._ranks, time.monotonic(), folder)
            for number, each in enumerate(planned):
                key = each.case.key
                progress.update(task, completed=number)
                try:
                    say = _talk(progress, task, key)
                    found[key] = sweep.measure(each, len(planned) - number, say)
                    self._show(found[key])
                except CaseFailedError as error:
                    left_out[key] = str(error)
                    self._line(f"{key}: left out: {error}", "yellow")
                self._keep(found.values(), left_out, folder)
            for each in planned:
                key = each.case.key
                if key in found:
                    say = _talk(progress, task, key)
                    found[key] = sweep.with_memory(each, found[key], say)
        return list(found.values()), left_out

    def _keep(
        self, cases: Iterable[CaseResult], left_out: Mapping[str, str], folder: Path | None
    ) -> None:
        result = self._result(tuple(cases), left_out)
        if folder is not None and result.cases:
            write_directory(result, folder, pictures=False)

    def _result(self, cases: Sequence[CaseResult], left_out: Mapping[str, str]) -> BenchResult:
        return BenchResult(
            environment=self._environment,
            options=asdict(self._options),
            command=self._command,
            seed=self._options.seed,
            cases=tuple(cases),
            left_out=dict(left_out),
        )

    def _greet(self) -> None:
        load = self._environment.load_average
        if self._options.nsys and self._device.type == "cpu":
            self._line(NSYS_NOTE, "yellow")
        self._line(describe(self._environment))
        if load is not None and load > _BUSY and self._device.type == "cpu":
            self._line(
                f"something else runs on this machine (load average {load:.1f}); the pairs will "
                "scatter", "yellow",
            )  # fmt: skip

    def _show(self, case: CaseResult) -> None:
        self._console.print(short_table(case).rich())
        for name, reason in not_run_table(case).rows:
            self._line(f"did not run: {name}: {reason}", "yellow")

    def _finish(self, result: BenchResult) -> None:
        for table in (overview(result), cpu_overview(result), memory_overview(result)):
            if table.rows:
                self._console.print(table.rich())
        self._line(NOT_MLPERF)

    def _line(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _talk(progress: Progress, task: TaskID, key: str) -> Say:
    """Return what puts the doings of a case into the progress bar."""
    return lambda phase, name, share: progress.update(task, description=f"{key}: {phase} {name}")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=2,
        transient=True,
        disable=not console.is_terminal,
    )
