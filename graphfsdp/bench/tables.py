"""A result as text: numbers in words, and tables for a terminal and for Markdown."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from graphfsdp.bench.records import (
    REFERENCE,
    BenchResult,
    CaseResult,
    ContenderResult,
    Environment,
    ParityRecord,
    Spread,
    WorkloadFacts,
)

# The loop that most people have.
PLAIN = "pytorch"
NOT_MLPERF = "MLPerf-style conventions; result not verified by MLCommons Association."
# Medians this near to 1 are called equal, whatever the pairs say.
_NEAR = 0.03
_WIDTH = 160  # of a file or a pipe


def wide_console(console: Console, *, quiet: bool = False) -> Console:
    """Return one that writes there, and whose tables are wide where no terminal says how wide."""
    width = None if console.is_terminal else max(console.width, _WIDTH)
    return Console(file=console.file, width=width, quiet=quiet)


@dataclass(frozen=True)
class Table:
    """The first ``num_left`` columns are aligned to the left."""

    title: str
    heading: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    num_left: int = 1

    def markdown(self) -> str:
        """Return the table in Markdown, without the title."""
        rule = tuple("---" if i < self.num_left else "---:" for i in range(len(self.heading)))
        lines = (self.heading, rule, *self.rows)
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
        )

    def rich(self, styles: Sequence[str] = ()) -> RichTable:
        """``styles`` are of the rows, where they have any."""
        made = RichTable(title=self.title, title_justify="left")
        for index, name in enumerate(self.heading):
            made.add_column(name, justify="left" if index < self.num_left else "right")
        for index, row in enumerate(self.rows):
            made.add_row(*map(escape, row), style=styles[index] if styles else "")
        return made


def verdict(spread: Spread) -> str:
    """Say in words what a ratio of speeds means; a ratio near 1 is nothing to boast of."""
    if abs(spread.median - 1) <= _NEAR:
        return "about equal"
    if spread.minimum < 1 < spread.maximum and abs(spread.median - 1) <= 2 * _NEAR:
        return "within the noise"
    return "faster" if spread.median > 1 else "slower"


def parity_text(parity: ParityRecord) -> str:
    if parity.bit_exact:
        return f"equal bit for bit ({parity.num_steps} steps)"
    if parity.max_difference is None or parity.early_difference is None:
        return "not finite"
    return (
        f"{parity.early_difference:.1e} in the first steps, {parity.max_difference:.1e} in "
        f"{parity.num_steps}"
    )


def bytes_text(num_bytes: float | None) -> str:
    if num_bytes is None:
        return ""
    mebibytes = num_bytes / 2**20
    return f"{mebibytes / 1024:.2f} GiB" if mebibytes >= 10_000 else f"{mebibytes:.1f} MiB"


def memory_text(own: ContenderResult) -> str:
    """Return the peak memory: of the allocator on a GPU, of the process on a CPU."""
    memory = own.memory
    if memory is None:
        return "not measured"
    reserved = memory.reserved_bytes
    more = "" if reserved is None else f", reserved {bytes_text(reserved)}"
    return bytes_text(memory.peak_bytes) + more


def utilization_text(case: CaseResult, own: ContenderResult) -> str:
    """Return MFU, or the share of the measured peak where no data sheet states one."""
    if case.peak.stated_tflops is not None:
        return f"{case.tflops(own) / case.peak.stated_tflops:.1%}"
    return f"{case.tflops(own) / case.peak.measured_tflops:.1%} of measured"


def peak_text(case: CaseResult) -> str:
    measured = f"{case.peak.measured_tflops:.3g} TFLOP/s measured ({case.peak.measured_how})"
    if case.peak.stated_tflops is None:
        return f"no data sheet states a peak for this machine; {measured}"
    return f"MFU is of {case.peak.stated_tflops:.0f} TFLOP/s dense (data sheet); {measured}"


def workload_text(workload: WorkloadFacts) -> str:
    items = f"x {workload.items_per_sample} tokens" if workload.unit == "tokens" else workload.unit
    return f"{workload.name} {workload.dtype}, {workload.batch_size} {items}"


def environment_text(environment: Environment) -> str:
    where = environment.gpu or f"{environment.cpu} ({environment.num_cpus} cores)"
    parts = [f"Measured {environment.date[:10]} on {where}"]
    if environment.gpu is None:
        plural = "s" if environment.num_threads > 1 else ""
        parts.append(f"{environment.num_threads} thread{plural}")
    if environment.num_ranks > 1:
        parts.append(f"{environment.num_ranks} ranks ({environment.backend})")
    parts.append(f"torch {environment.torch}")
    if environment.driver is not None:
        parts.append(f"CUDA {environment.cuda}, driver {environment.driver}")
    parts.append(f"Python {environment.python}")
    text = ", ".join(parts)
    if environment.load_average is not None and environment.load_average > 0.5:
        text += f"; other programs ran meanwhile (load average {environment.load_average:.1f})"
    return f"{text}."


def contender_names(cases: Sequence[CaseResult]) -> list[str]:
    """Return every contender that ran or was to run, the reference first, in order."""
    found: dict[str, None] = {REFERENCE: None}
    for case in cases:
        found |= {item.name: None for item in case.contenders}
    for case in cases:
        found |= {item.name: None for item in case.not_run}
    return list(found)


def _overview(
    result: BenchResult, title: str, cell: Callable[[CaseResult, ContenderResult], str]
) -> Table:
    """Return one row per case and one column per contender; rows without a number are left out."""
    names = [
        name for name in contender_names(result.cases) if any(c.find(name) for c in result.cases)
    ]
    rows = []
    for case in result.cases:
        found = {own.name: cell(case, own) for own in case.contenders}
        if any(found.values()):
            rows.append((workload_text(case.workload), *(found.get(name) or "-" for name in names)))
    return Table(title, ("workload", *names), tuple(rows))


def overview(result: BenchResult) -> Table:
    def cell(case: CaseResult, own: ContenderResult) -> str:
        text, speedup = f"{own.timing.steps.median:.2f}", case.speedup(own.name)
        if own.name == REFERENCE or speedup is None:
            return text
        return f"{text} ({speedup.median:.2f}x)"

    title = "milliseconds per step (median), and how many times as fast as eager (median of pairs)"
    return _overview(result, title, cell)


def cpu_overview(result: BenchResult) -> Table:
    """Return the same of the process's CPU time; empty where the work is a GPU's."""

    def cell(case: CaseResult, own: ContenderResult) -> str:
        ratios = case.cpu_ratios(own.name)
        if not ratios or result.environment.gpu is not None:
            return ""
        text = f"{statistics.median(own.timing.cpu_ms):.2f}"
        if own.name == REFERENCE:
            return text
        return f"{text} ({statistics.median(ratios):.2f}x)"

    title = "CPU ms per step, which other programs hardly change, and eager's over each"
    return _overview(result, title, cell)


def memory_overview(result: BenchResult) -> Table:
    title = "peak memory: of the process on a CPU, libraries included, of the allocator on a GPU"
    return _overview(result, title, lambda case, own: memory_text(own) if own.memory else "")


def _speedup_text(case: CaseResult, own: ContenderResult) -> str:
    return "1" if own.name == REFERENCE else str(case.speedup(own.name) or "")


def _verdict_text(case: CaseResult, own: ContenderResult) -> str:
    speedup = case.speedup(own.name)
    return "reference" if own.name == REFERENCE or speedup is None else verdict(speedup)


def _losses_text(case: CaseResult, own: ContenderResult) -> str:
    return "reference" if own.name == REFERENCE else parity_text(own.parity)


def _seconds(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds / 1e3:.2f}"


_COLUMNS: Mapping[str, Callable[[CaseResult, ContenderResult], str]] = MappingProxyType(
    {
        "ms/step": lambda case, own: f"{own.timing.steps.median:.3f}",
        "mean": lambda case, own: f"{own.timing.steps.mean:.3f}",
        "p5": lambda case, own: f"{own.timing.steps.p5:.3f}",
        "p95": lambda case, own: f"{own.timing.steps.p95:.3f}",
        "p99": lambda case, own: f"{own.timing.steps.p99:.3f}",
        "max": lambda case, own: f"{own.timing.steps.maximum:.3f}",
        "times as fast as eager": _speedup_text,
        "which is": _verdict_text,
        "times as fast as pytorch": lambda case, own: str(case.speedup(own.name, PLAIN) or ""),
        "per second": lambda case, own: f"{case.items_per_s(own):,.0f}",
        "model TFLOP/s": lambda case, own: f"{case.tflops(own):.3g}",
        "MFU": utilization_text,
        "host ms": lambda case, own: f"{statistics.fmean(own.timing.host_ms):.3f}",
        "CPU ms": lambda case, own: f"{statistics.fmean(own.timing.cpu_ms):.3f}",
        "init s": lambda case, own: _seconds(own.init.build_ms + own.init.warmup_ms),
        "of it compile": lambda case, own: _seconds(own.init.compile_ms),
        "of it capture": lambda case, own: _seconds(own.init.capture_ms),
        "nodes": lambda case, own: "" if own.init.num_nodes is None else f"{own.init.num_nodes:,}",
        "pool": lambda case, own: bytes_text(own.init.pool_bytes),
        "peak memory": lambda case, own: memory_text(own),
        "losses against eager": _losses_text,
    }
)
_SPEED = (
    *("ms/step", "mean", "p5", "p95", "p99", "max", "times as fast as eager", "which is"),
    *("times as fast as pytorch", "per second", "model TFLOP/s", "MFU", "host ms", "CPU ms"),
)
_START = (
    *("init s", "of it compile", "of it capture", "nodes", "pool", "peak memory"),
    "losses against eager",
)
_SHORT = (
    *("ms/step", "p95", "times as fast as eager", "per second", "init s", "losses against eager"),
)


def _case_table(case: CaseResult, title: str, columns: Sequence[str]) -> Table:
    unit = f"{case.workload.unit}/s"
    heading = ("contender", *(unit if name == "per second" else name for name in columns))
    rows = [(own.name, *(_COLUMNS[name](case, own) for name in columns)) for own in case.contenders]
    return Table(title, heading, tuple(rows))


def speed_table(case: CaseResult) -> Table:
    windows = case.contenders[0].timing.step_ms
    title = f"{len(windows)} windows of {len(windows[0])} steps each, in turns"
    return _case_table(case, f"{workload_text(case.workload)}: {title}", _SPEED)


def start_table(case: CaseResult) -> Table:
    """Return what lies outside of the timed region: init, memory, losses."""
    return _case_table(case, "outside of the timed region", _START)


def short_table(case: CaseResult) -> Table:
    return _case_table(case, workload_text(case.workload), _SHORT)


def not_run_table(case: CaseResult) -> Table:
    """Return the contenders of a case that could not run, each with the reason."""
    rows = [(item.name, item.reason) for item in case.not_run]
    return Table("did not run", ("contender", "why"), tuple(rows), num_left=2)


def reasons(result: BenchResult) -> dict[str, str]:
    """Return the contenders that ran in no case, each with the first reason."""
    found: dict[str, str] = {}
    for case in result.cases:
        for item in case.not_run:
            if not any(each.find(item.name) for each in result.cases):
                found.setdefault(item.name, item.reason)
    return found
