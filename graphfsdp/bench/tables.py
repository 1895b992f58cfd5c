"""A result as tables: plain rows, and these as Markdown and for a terminal."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable

from graphfsdp.bench.environment import describe
from graphfsdp.bench.records import NOT_ASKED, REFERENCE, BenchResult, CaseResult
from graphfsdp.bench.words import (
    bytes_text,
    contender_names,
    memory_text,
    own_memory_text,
    parity_text,
    peak_text,
    ratio_text,
    short_parity_text,
    utilization_text,
    verdict,
    workload_text,
)

# The loop that most people have.
PLAIN = "pytorch"
NOT_MLPERF = "MLPerf-style conventions; result not verified by MLCommons Association."


@dataclass(frozen=True)
class Table:
    """A table as text.

    Attributes:
        num_left: Columns that are aligned to the left.
    """

    title: str
    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_left: int = 1

    def markdown(self) -> str:
        """Return the table in Markdown, without the title."""
        rule = tuple(
            "---" if index < self.num_left else "---:" for index in range(len(self.heading))
        )
        lines = (self.heading, rule, *self.rows)
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
        )

    def rich(self) -> RichTable:
        """Return the table for a terminal."""
        made = RichTable(title=self.title, title_justify="left")
        for index, name in enumerate(self.heading):
            made.add_column(name, justify="left" if index < self.num_left else "right")
        for row in self.rows:
            made.add_row(*row)
        return made


def overview(result: BenchResult) -> Table:
    """Return one row per case and one column per contender: ms/step, and how many times as fast."""
    names = [name for name in contender_names(result.cases) if _ran(result, name)]
    rows = []
    for case in result.cases:
        cells = [workload_text(case.workload)]
        for name in names:
            own, speedup = case.find(name), case.speedup(name)
            if own is None:
                cells.append("-")
            elif name == REFERENCE or speedup is None:
                cells.append(f"{own.timing.steps.median:.2f}")
            else:
                cells.append(f"{own.timing.steps.median:.2f} ({speedup.median:.2f}x)")
        rows.append(tuple(cells))
    title = "milliseconds per step (median), and how many times as fast as eager (median of pairs)"
    return Table(title, ("workload", *names), tuple(rows))


def cpu_overview(result: BenchResult) -> Table:
    """Return the same of the process's CPU time; empty where the work is a GPU's.

    Other programs on the machine hardly change it.
    """
    if result.environment.gpu is not None:
        return Table("", (), ())
    names = [name for name in contender_names(result.cases) if _ran(result, name)]
    rows = []
    for case in result.cases:
        cells = [workload_text(case.workload)]
        for name in names:
            own, ratios = case.find(name), case.cpu_ratios(name)
            if own is None or not ratios:
                cells.append("-")
                continue
            text = f"{statistics.median(own.timing.cpu_ms):.2f}"
            if name != REFERENCE:
                text += f" ({statistics.median(ratios):.2f}x)"
            cells.append(text)
        rows.append(tuple(cells))
    title = "CPU ms per step, which other programs hardly change, and eager's over each"
    return Table(title, ("workload", *names), tuple(rows))


def memory_overview(result: BenchResult) -> Table:
    """Return one row per case whose memory was measured: peak memory of each contender."""
    names = [name for name in contender_names(result.cases) if _ran(result, name)]
    rows = []
    for case in result.cases:
        found = {own.name: own_memory_text(own) for own in case.contenders if own.memory}
        if found:
            cells = [found.get(name, "-") for name in names]
            rows.append((workload_text(case.workload), *cells))
    title = "peak memory, and on a CPU (of it, what the training takes besides the libraries)"
    return Table(title, ("workload", *names), tuple(rows))


def speed_table(case: CaseResult) -> Table:
    """Return the timed region of a case."""
    rows = []
    for own in case.contenders:
        steps = own.timing.steps
        speedup = case.speedup(own.name)
        is_reference = own.name == REFERENCE or speedup is None
        host_ms = sum(own.timing.host_ms) / len(own.timing.host_ms)
        cpu_ms = sum(own.timing.cpu_ms) / len(own.timing.cpu_ms)
        rows.append(
            (
                own.name,
                *(f"{value:.3f}" for value in (steps.median, steps.mean, steps.p5)),
                *(f"{value:.3f}" for value in (steps.p95, steps.p99, steps.maximum)),
                "1" if is_reference else ratio_text(speedup),
                "reference" if is_reference or speedup is None else verdict(speedup),
                ratio_text(case.speedup(own.name, PLAIN)),
                f"{case.items_per_s(own.name):,.0f}",
                f"{case.tflops(own.name):.3g}",
                utilization_text(case, own.name),
                f"{host_ms:.3f}",
                f"{cpu_ms:.3f}",
            )
        )
    heading = (
        *("contender", "ms/step", "mean", "p5", "p95", "p99", "max"),
        *("times as fast as eager", "which is", "times as fast as pytorch"),
        *(f"{case.workload.unit}/s", "model TFLOP/s", "MFU", "host ms", "CPU ms"),
    )
    first = case.contenders[0].timing
    title = (
        f"{workload_text(case.workload)}: {len(first.step_ms)} windows of "
        f"{len(first.step_ms[0])} steps each, in turns"
    )
    return Table(title, heading, tuple(rows))


def short_table(case: CaseResult) -> Table:
    """Return what fits into a terminal."""
    rows = []
    for own in case.contenders:
        steps, speedup = own.timing.steps, case.speedup(own.name)
        is_reference = own.name == REFERENCE
        ready_ms = own.init.build_ms + own.init.warmup_ms
        rows.append(
            (
                own.name,
                *(f"{value:.2f}" for value in (steps.median, steps.p95)),
                "1" if is_reference else ratio_text(speedup),
                f"{case.items_per_s(own.name):,.0f}",
                f"{ready_ms / 1e3:.1f}",
                "reference" if is_reference else short_parity_text(own.parity),
            )
        )
    heading = (
        *("contender", "ms/step", "p95", "times as fast as eager", f"{case.workload.unit}/s"),
        *("init s", "losses"),
    )
    return Table(workload_text(case.workload), heading, tuple(rows))


def start_table(case: CaseResult) -> Table:
    """Return what lies outside of the timed region: init, memory, losses, roofline."""
    rows = []
    for own in case.contenders:
        init, roofline = own.init, own.roofline
        rows.append(
            (
                own.name,
                f"{(init.build_ms + init.warmup_ms) / 1e3:.2f}",
                "" if init.compile_ms is None else f"{init.compile_ms / 1e3:.2f}",
                "" if init.capture_ms is None else f"{init.capture_ms / 1e3:.2f}",
                "" if init.num_nodes is None else f"{init.num_nodes:,}",
                bytes_text(init.pool_bytes),
                memory_text(own),
                "reference" if own.name == REFERENCE else parity_text(own.parity),
                "" if roofline is None else f"{roofline.kernel_ms:.3f}",
                "" if roofline is None else f"{roofline.ratio:.2f}",
            )
        )
    heading = (
        *("contender", "init s", "of it compile", "of it capture", "nodes", "pool"),
        *("peak memory", "losses against eager", "kernels ms", "step / kernels"),
    )
    return Table("outside of the timed region", heading, tuple(rows))


def not_run_table(case: CaseResult) -> Table:
    """Return the contenders of a case that did not run; those not asked for in one row."""
    rows = [(item.name, item.reason) for item in case.not_run if item.reason != NOT_ASKED]
    others = [item.name for item in case.not_run if item.reason == NOT_ASKED]
    if others:
        rows.append((", ".join(others), NOT_ASKED))
    return Table("did not run", ("contender", "why"), tuple(rows), num_left=2)


def case_notes(case: CaseResult) -> list[str]:
    """Return the sentences that belong to a case's tables."""
    workload = case.workload
    notes = [
        f"{workload.num_parameters:,} parameters; {workload.data}; "
        f"{workload.flops_per_step / 1e9:,.3g} GFLOP per step on each rank: "
        f"{workload.flops_formula}; {peak_text(case)}."
    ]
    rooflines = dict.fromkeys(own.roofline.how for own in case.contenders if own.roofline)
    notes += [f"kernels ms: {how}." for how in rooflines]
    memories = dict.fromkeys(own.memory.how for own in case.contenders if own.memory)
    notes += [f"peak memory: {how}." for how in memories]
    notes += [f"{own.name}: {note}." for own in case.contenders for note in own.notes]
    return notes


def report_markdown(result: BenchResult, pictures: Sequence[str] = ()) -> str:
    """Return a whole result in Markdown.

    Args:
        result: What was measured.
        pictures: Names of files beside the text.
    """
    parts = ["# graphfsdp bench", describe(result.environment), f"`{result.command}`", NOT_MLPERF]
    for table in (overview(result), cpu_overview(result)):
        if table.rows:
            parts += [f"**{table.title}**", table.markdown()]
    parts += [f"![{name}]({name})" for name in pictures]
    for case in result.cases:
        speed, start = speed_table(case), start_table(case)
        parts += [f"## {workload_text(case.workload)}", speed.title + ".", speed.markdown()]
        parts += [start.title.capitalize() + ":", start.markdown()]
        parts += case_notes(case)
        table = not_run_table(case)
        if table.rows:
            parts += ["Did not run:", table.markdown()]
    if result.left_out:
        parts.append("## Left out")
        parts += [f"- {name}: {reason}" for name, reason in result.left_out.items()]
    parts += ["## Contenders", *_described(result)]
    return "\n\n".join(parts) + "\n"


def reasons(result: BenchResult) -> dict[str, str]:
    """Return the contenders that ran in no case, each with the first reason that says something."""
    found: dict[str, str] = {}
    for case in result.cases:
        for item in case.not_run:
            if not _ran(result, item.name) and found.get(item.name, NOT_ASKED) == NOT_ASKED:
                found[item.name] = item.reason
    return found


def _described(result: BenchResult) -> list[str]:
    texts: dict[str, str] = {}
    for case in result.cases:
        texts |= {item.name: item.description for item in case.contenders}
        texts |= {item.name: item.description for item in case.not_run}
    return [f"- `{name}`: {texts[name]}" for name in contender_names(result.cases) if name in texts]


def _ran(result: BenchResult, name: str) -> bool:
    return any(case.find(name) for case in result.cases)
